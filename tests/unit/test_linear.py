"""Every form in which a matrix is held multiplies as float32 does, and none is chosen that would change a weight."""

from __future__ import annotations

import pytest
import torch

from pdbus.bus.errors import ConfigError
from pdbus.nodes.engines import linear
from pdbus.nodes.engines.linear import LinearMaker, Pack, exact_shift, fp16, onednn, plain, transposed

WIDTH = 96


def matrix(outputs: int = 64, scale: float = 0.02) -> torch.Tensor:
    """Random float32 weights."""
    return torch.randn(outputs, WIDTH, generator=torch.Generator().manual_seed(outputs)) * scale


def half(outputs: int = 64, scale: float = 0.02) -> torch.Tensor:
    """Weights as a bfloat16 checkpoint has them."""
    return matrix(outputs, scale).bfloat16().float()


def forms(weights: str, weight: torch.Tensor) -> list[str]:
    """The forms that are considered for a matrix, best first."""
    return [form for form, _ in LinearMaker(weights, packs=True, deterministic=False)._forms("w", weight)]


@pytest.mark.parametrize("pack", [plain, transposed, onednn, fp16])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 100])
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_form_multiplies_alike(pack: Pack, rows: int, has_bias: bool) -> None:
    weight, bias = half(800), torch.randn(800) if has_bias else None
    x = torch.randn(rows, WIDTH)
    exact = x.double() @ weight.double().t() + (bias.double() if bias is not None else 0)
    torch.testing.assert_close(pack(weight, bias)(x), exact.float(), atol=1e-5, rtol=0)


def test_auto_takes_fp16_for_what_was_bfloat16() -> None:
    """Values that float16 has only near zero, and there in part, are shifted to where it has them all."""
    weight = half(400)
    weight[0, :4] = torch.tensor([1.2e-6, -3.3e-7, 4.4e-9, 0.0]).bfloat16().float()
    assert exact_shift(weight) not in (0, None)
    assert forms("auto", weight)[0] == "fp16"
    chosen = LinearMaker("auto", packs=True, deterministic=False)("w", weight)
    column = torch.eye(WIDTH)[:4]
    assert torch.equal(chosen(column)[:, 0], weight[0, :4])


def test_weights_that_float16_has_are_not_shifted() -> None:
    """A shift costs a multiplication of every row."""
    assert exact_shift(torch.full((4, WIDTH), 0.25)) == 0
    assert exact_shift(torch.zeros(4, WIDTH)) == 0


@pytest.mark.parametrize("bad", [1 / 3, 1e38, float("nan"), float("inf")])
def test_auto_keeps_float32_where_one_weight_would_change(bad: float) -> None:
    weight = half()
    weight[-1, -1] = bad
    assert exact_shift(weight) is None
    assert "fp16" not in forms("auto", weight)


def test_a_shift_that_the_rows_could_not_undo_is_not_made() -> None:
    assert exact_shift(torch.full((4, WIDTH), 2.0**-20)) == 0
    assert exact_shift(torch.full((4, WIDTH), 2.0**-40)) == 54
    assert exact_shift(torch.full((4, WIDTH), 2.0**-60)) is None


def test_fp16_rounds_when_it_is_told_to() -> None:
    weight, x = matrix(), torch.randn(8, WIDTH)
    assert forms("fp16", weight) == ["fp16"]
    rounded = LinearMaker("fp16", packs=True, deterministic=False)("w", weight)(x)
    torch.testing.assert_close(rounded, plain(weight, None)(x), atol=1e-3, rtol=0)
    assert not torch.equal(rounded, plain(weight, None)(x))


def test_float32_is_the_fallback_without_fbgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "has_fbgemm", lambda: False)
    assert forms("auto", half()) == ["transposed", "plain"]
    with pytest.raises(ConfigError, match="FBGEMM") as caught:
        LinearMaker("fp16", packs=True, deterministic=False)
    assert caught.value.setting == "--weights"


def test_wide_matrices_are_oneDNNs() -> None:
    assert forms("float32", matrix(8 * WIDTH)) == ["onednn", "transposed", "plain"]


def test_nothing_is_packed_off_the_cpu() -> None:
    maker = LinearMaker("auto", packs=False, deterministic=False)
    assert [form for form, _ in maker._forms("w", half(800))] == ["plain"]


@pytest.mark.parametrize(("weights", "packs"), [("fp16", False), ("int8", True)])
def test_settings_that_cannot_work_are_named(weights: str, packs: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        LinearMaker(weights, packs=packs, deterministic=False)
    assert caught.value.setting == "--weights"


def test_weights_beyond_float16_are_refused_by_name() -> None:
    weight = matrix()
    weight[3, 3] = 70_001.0
    with pytest.raises(ConfigError, match=r"^--weights: layer\.weight has weights beyond"):
        LinearMaker("fp16", packs=True, deterministic=False)("layer.weight", weight)
