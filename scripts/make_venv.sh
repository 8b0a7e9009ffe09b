#!/usr/bin/env bash
# Makes a virtual environment in the folder given, with a Python that JaxForge runs on (3.12 to 3.14).
# A Python counts only if it really runs: pyenv leaves a python3.12 on the PATH that fails when called.
# PYTHON=/path/to/python makes the choice by hand.
set -euo pipefail

venv=${1:?usage: scripts/make_venv.sh FOLDER}

runs() { # Is $1 a Python of a supported version?
    "$1" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1
}

can_make_venv() { # Debian ships python3 without ensurepip; python3.x-venv brings it.
    "$1" -c 'import ensurepip, venv' >/dev/null 2>&1
}

if [ -x "$venv/bin/python" ] && runs "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    exit 0
fi

without_venv=""
candidates() {
    if [ -n "${PYTHON:-}" ]; then
        echo "$PYTHON"
        return
    fi
    printf '%s\n' python3.13 python3.12 python3.14 python3 python
    # pyenv's own folder, newest first: it has Pythons that its PATH doesn't lead to.
    printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python | sort -rV
}

while read -r candidate; do
    runs "$candidate" || continue
    if can_make_venv "$candidate"; then
        echo "making $venv with $("$candidate" --version) ($("$candidate" -c 'import sys; print(sys.executable)'))"
        "$candidate" -m venv --clear "$venv"
        exit 0
    fi
    without_venv=${without_venv:-$candidate}
done < <(candidates)

if [ -z "${PYTHON:-}" ] && command -v uv >/dev/null 2>&1; then
    echo "making $venv with uv"
    rm -rf "$venv"
    uv venv --quiet --seed --python 3.12 "$venv" && exit 0 # --seed brings pip
fi

if [ -n "${PYTHON:-}" ]; then
    echo "PYTHON=$PYTHON is not a Python 3.12 to 3.14 with the venv module" >&2
elif [ -n "$without_venv" ]; then
    echo "$without_venv lacks the venv module: install it (Debian, Ubuntu: apt install $without_venv-venv)" >&2
else
    echo "no Python 3.12 to 3.14 found: install one (apt install python3.12 python3.12-venv, pyenv, or uv)," \
        "or name it: make setup PYTHON=/path/to/python" >&2
fi
exit 1
