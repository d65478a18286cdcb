# Sourced by the scripts: makes .venv in the project's folder, or brings it up to date, and sets $VENV_PYTHON.
# PYTHON chooses the interpreter it is made with; nothing outside the project's folder is written.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV="$ROOT/.venv"
VENV_PYTHON="$VENV/bin/python"

find_python() {
    local candidate found=""
    for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            found=$candidate
            break
        fi
    done
    if [ -z "$found" ]; then
        echo "Python 3.11 or newer with its venv module is needed (on Debian and Ubuntu: apt install python3 python3-venv); set PYTHON to one." >&2
        return 1
    fi
    # a version manager's Python is often built without optimizations, and takes half as long again
    if [ -z "${PYTHON:-}" ] && is_faster /usr/bin/python3 "$found"; then
        found=/usr/bin/python3
    fi
    echo "$found"
}

# Is the Python $1 of the version of $2, able to make environments and to compile, and faster by a fifth?
is_faster() {
    local this other
    this=($(speed "$1")) && other=($(speed "$2")) || return 1
    [ "${this[0]}" = "${other[0]}" ] && [ $((this[1] * 5)) -lt $((other[1] * 4)) ]
}

# Prints the version of the Python $1 and the microseconds that calls of functions take a busy processor.
speed() {
    "$1" - 2>/dev/null <<'END'
import ensurepip, os, sys, sysconfig, time, timeit, venv
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    sys.exit(1)
loop = "for i in range(5000): call(i, 1, c=i)"
call = "def call(*args, **kwargs): return {**kwargs, 'args': args}"
seconds = min(timeit.repeat(loop, call, time.process_time, number=1, repeat=100))
print("%d.%d" % sys.version_info[:2], round(seconds * 1e6))
END
}

make_environment() {
    local wanted python
    wanted=$(cat "$ROOT/requirements.txt" "$ROOT/scripts/constraints.txt")
    if [ -x "$VENV_PYTHON" ] && [ "$(cat "$VENV/installed" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    python=$(find_python)
    echo "Making the environment in .venv (once; a few minutes) ..."
    [ -x "$VENV_PYTHON" ] || "$python" -m venv "$VENV"
    # torch first and alone: packages that depend on it then find it there
    "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check "$(grep '^torch==' "$ROOT/scripts/constraints.txt")"
    "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check -r "$ROOT/requirements.txt" -c "$ROOT/scripts/constraints.txt" pytest pytest-timeout gguf comfy-kitchen
    printf '%s\n' "$wanted" > "$VENV/installed"
}

make_lint_tools() {
    # of the versions in constraints.txt: another ruff may format otherwise. nodejs: pyright runs on Node.js
    local tools wanted
    tools=(ruff 'pyright[nodejs]')
    wanted=$(printf '%s\n' "${tools[@]}"; grep -E '^(ruff|pyright)==' "$ROOT/scripts/constraints.txt")
    if [ "$(cat "$VENV/lint-installed" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check -c "$ROOT/scripts/constraints.txt" "${tools[@]}"
    printf '%s\n' "$wanted" > "$VENV/lint-installed"
}
