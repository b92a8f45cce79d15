"""What config.json says of the rotary position encoding, read as transformers reads it."""

from __future__ import annotations

import math

from pdbus.bus.errors import ConfigError
from pdbus.bus.wire import Declared

from .fields import Fields

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
TABLES = ("rope_scaling", "rope_parameters")  # the first of them that says anything holds, as in transformers

ORIGINAL = "original_max_position_embeddings"


class RopeConfig(Declared):
    """Rotary position encoding. `kind` linear divides positions by `factor`; llama3 only the slow frequencies, and yarn
    too; longrope divides each frequency by its own of `factors`. The last two also multiply what is rotated by
    `attention_factor`."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192
    beta_fast: float = 32.0  # turns within the original context: from so many on a frequency stays as it is
    beta_slow: float = 1.0  # up to so many it is divided
    truncate: bool = True  # these bounds to whole channels
    attention_factor: float = 1.0
    factors: tuple[float, ...] = ()
    score_factor: float = 1.0  # that latent attention multiplies its scores by


def read_rope(fields: Fields, max_positions: int, channels: int) -> RopeConfig:
    """Both spellings: rope_theta with rope_scaling, and the newer rope_parameters that holds everything. `channels` of
    a head are rotated.

    Where both are given, rope_scaling alone holds. What then would be passed over without a word and means something
    else is refused: another type or base beside it. Raises ConfigError naming `--model`, the file and the key.
    """
    given = [name for name in TABLES if fields.get(name) not in (None, {})]
    tables = [fields.table(name) for name in given]
    kinds = [_kind(table) for table in tables]
    rope, kind = (tables[0], kinds[0]) if tables else (fields.table(TABLES[0]), "default")
    theta = rope.real("rope_theta", fields.real("rope_theta", 10_000.0))
    if len(tables) == 2:
        _refuse_contradiction(kinds[0], kinds[1], theta, tables[1].real("rope_theta", theta))
    if rope.real("partial_rotary_factor", 1.0) != 1:
        raise rope.error("partial_rotary_factor", f"= {rope.get('partial_rotary_factor')!r} is not supported")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=rope.real("factor"))
    if kind == "yarn":
        return _yarn(rope, theta, max_positions)
    if kind == "longrope":
        original = fields if ORIGINAL in fields else rope  # as Phi-3 has it
        return _longrope(rope, theta, original.whole(ORIGINAL, max_positions), max_positions, channels)
    low, high = rope.real("low_freq_factor"), rope.real("high_freq_factor")
    if low >= high:
        raise rope.error("high_freq_factor", f"is {high:g}, but must be more than low_freq_factor, {low:g}")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=rope.real("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_positions=rope.whole(ORIGINAL, max_positions),
    )


def _yarn(rope: Fields, theta: float, max_positions: int) -> RopeConfig:
    """YaRN (Peng et al., 2023, arXiv:2309.00071), with DeepSeek's `mscale` and `mscale_all_dim`."""
    original = rope.whole(ORIGINAL, max_positions)
    factor = rope.real("factor", max_positions / original)
    if "mscale" in rope and "mscale_all_dim" in rope:
        attention_factor = _mscale(factor, rope.real("mscale")) / _mscale(factor, rope.real("mscale_all_dim"))
    else:
        attention_factor = _mscale(factor, 1.0)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_positions=original,
        beta_fast=rope.real("beta_fast", 32.0),
        beta_slow=rope.real("beta_slow", 1.0),
        truncate=rope.switch("truncate", True),
        attention_factor=rope.real("attention_factor", attention_factor),
        score_factor=_mscale(factor, rope.real("mscale_all_dim")) ** 2 if "mscale_all_dim" in rope else 1.0,
    )


def _longrope(rope: Fields, theta: float, original: int, max_positions: int, channels: int) -> RopeConfig:
    """LongRoPE (Ding et al., 2024, arXiv:2402.13753) within the context that the model was first trained for.

    Beyond it other factors hold, for all positions: keys that are in the cache, and shared, would have to turn.
    """
    factor = rope.real("factor", max_positions / original)
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    return RopeConfig(
        theta=theta,
        kind="longrope",
        original_positions=original,
        attention_factor=rope.real("attention_factor", grown),
        factors=rope.reals("short_factor", channels // 2),
    )


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _kind(table: Fields) -> str:
    """`rope_type`, in older files `type`."""
    kinds = {key: table.text(key, "default") for key in ("rope_type", "type") if key in table}
    for key, kind in kinds.items():
        if kind not in ROPE_TYPES:
            raise table.error(key, f"{kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if len(set(kinds.values())) > 1:
        raise table.error("rope_type", f"is {kinds['rope_type']!r}, but type is {kinds['type']!r}: keep one of them")
    return next(iter(kinds.values()), "default")


def _refuse_contradiction(kind: str, passed_over: str, theta: float, other: float) -> None:
    where = "config.json: rope_scaling and rope_parameters contradict each other"
    if passed_over not in ("default", kind):
        raise ConfigError("--model", f"{where}: rope type {kind!r} and {passed_over!r}; keep one of them")
    if other != theta:
        raise ConfigError("--model", f"{where}: rope_theta {theta:g} and {other:g}; keep one of them")
