#!/usr/bin/env bash
# Write requirements/cpu.lock from cpu.in and overrides.txt (`make lock`).
#
# uv is taken from UV, or installed by pip into a throw-away environment. uv does not read pip's configuration, so the
# indexes and find-links that pip is configured with are handed to it here; none of them is written to the lock.
# Options are passed on to uv: `requirements/compile.sh --upgrade-package ray`. Without options present pins are kept.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3.11}
if [[ -z ${UV:-} ]]; then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    "$PYTHON" -m venv "$scratch"
    "$scratch/bin/pip" install --quiet uv==0.13.9
    UV=$scratch/bin/uv
fi

pip_setting() { # the values of one pip setting, space separated
    "$PYTHON" -m pip config list | sed -n "s/^\(:env:\|global\|install\)\.$1='\(.*\)'\$/\2/p" | sed 's/\\n/ /g' | xargs
}
index=$(pip_setting index-url)
links=$(pip_setting find-links)
if [[ -n $index ]]; then export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-${index%% *}}"; fi
export UV_INDEX="${UV_INDEX:-$(pip_setting extra-index-url)}"
export UV_FIND_LINKS="${UV_FIND_LINKS:-${links// /,}}"
export UV_CUSTOM_COMPILE_COMMAND="make lock"
"$UV" pip compile requirements/cpu.in \
    --overrides requirements/overrides.txt \
    --output-file requirements/cpu.lock \
    --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
    --index-strategy unsafe-best-match \
    --no-emit-index-url --no-emit-find-links --annotation-style line --quiet \
    "$@"

# What must never get in: CUDA, the packages that overrides.txt drops, an address, a path.
if grep -nE '^(nvidia-|cuda-|triton|torchvision|torchaudio|torchcodec|scikit-learn)|^torch==[0-9.]+( |$)|://|^-| @ ' requirements/cpu.lock; then
    echo "requirements/cpu.lock holds the lines above, which must not be installed: see requirements/overrides.txt" >&2
    exit 1
fi
