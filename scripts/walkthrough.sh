#!/usr/bin/env bash
# Writes the body of docs/walkthrough.md: from a clone to a sentence, as a user with an empty home.
#
#     scripts/walkthrough.sh > docs/walkthrough.md
#
# Needs git, rustup with stable Rust, python3 with venv, a C linker, and the registries of Rust and
# Python. Downloads PyTorch. PYTHON_PACKAGES names a directory of installed packages (torch,
# transformers, compressed-tensors) to use instead.
set -euo pipefail
checkout="$(cd "$(dirname "$0")/.." && pwd)"
export RUSTUP_HOME="${RUSTUP_HOME:-$HOME/.rustup}"
user="$(mktemp -d)"
trap 'rm -rf "$user"' EXIT
export HOME="$user" CARGO_HOME="$user/.cargo" TERM=dumb COLUMNS=80 HF_HUB_DISABLE_PROGRESS_BARS=1
export PATH="$user/.local/bin:$PATH"
cd "$user"

# Prints a command, runs it, and prints its output.
show() {
    printf '$ %s\n' "$1"
    bash -o pipefail -c "$1" 2>&1
}

# Like show, without the output of a command that prints much, and with the time it took.
timed() {
    local start=$SECONDS
    printf '$ %s\n' "$1"
    bash -o pipefail -c "$1" >"$user/log" 2>&1 || {
        cat "$user/log" >&2
        exit 1
    }
    printf '(%d s)\n' $((SECONDS - start))
}

clone="git clone --quiet $checkout microscale"
$clone
version="$(git -C microscale log -1 --format=%h)"

cat <<TEXT
# From a clone to a sentence

The commands below ran one after the other, as a user with an empty home directory, at commit
\`$version\`, on $(nproc) cores of an x86-64 virtual machine, $(date -u +%Y-%m-%d).
\`scripts/walkthrough.sh\` runs them again and prints this page.

## Install

Nothing is released yet, so both ways build from a checkout. Times include downloads.

\`\`\`console
$ git clone REPOSITORY microscale
TEXT
timed "cargo install --quiet --locked --path microscale/cli --root .local"
show "microscale --version"
cat <<TEXT
\`\`\`

The Python package, as a wheel. It has the program, too:

\`\`\`console
TEXT
timed "python3 -m venv venv"
if [ -n "${PYTHON_PACKAGES:-}" ]; then
    # Packages that a user downloads.
    echo "$PYTHON_PACKAGES" >"$(echo venv/lib/python3*/site-packages)/packages.pth"
    venv/bin/pip install --quiet maturin
    echo '$ venv/bin/pip install maturin torch transformers compressed-tensors'
else
    timed "venv/bin/pip install --quiet maturin torch transformers compressed-tensors"
fi
timed "venv/bin/maturin build --quiet --release --locked -m microscale/python/Cargo.toml -o wheels"
timed "venv/bin/pip install --quiet --no-index wheels/microscale-*.whl"
show "venv/bin/python -c 'import microscale; print(microscale.__version__)'"
cat <<TEXT
\`\`\`

## Quantize and check

\`sample/tiny-story\` is a language model of 3.7 million parameters:

\`\`\`console
TEXT
show "microscale quantize microscale/sample/tiny-story tiny-story-mxfp4"
show "microscale doctor tiny-story-mxfp4 --against microscale/sample/tiny-story"
cat <<TEXT
\`\`\`

## Load it in transformers

\`\`\`python
TEXT
cat >generate.py <<'PYTHON'
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("tiny-story-mxfp4", dtype="bfloat16")
tokenizer = AutoTokenizer.from_pretrained("tiny-story-mxfp4")
inputs = tokenizer("She was", return_tensors="pt")
tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)
print(tokenizer.decode(tokens[0]))
PYTHON
cat generate.py
cat <<TEXT
\`\`\`

\`\`\`console
TEXT
echo '$ venv/bin/python generate.py'
venv/bin/python generate.py 2>"$user/log" || {
    cat "$user/log" >&2
    exit 1
}
cat <<TEXT
\`\`\`

For other engines, see [Serving](serving.md).
TEXT
