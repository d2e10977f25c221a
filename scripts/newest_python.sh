#!/bin/sh
# Prints the path of the first Python among the versions $@ (such as 3.14 3.13) that can make virtual environments;
# nothing if there is none. A name on PATH may be a shim that only fails, so each candidate is asked.
for version
do
    for candidate in \
        "python$version" \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version"*/bin/"python$version" \
        "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}"/cpython-"$version"*/bin/"python$version"
    do
        path=$("$candidate" -c 'import sys, venv, ensurepip; print(sys.executable)' 2>/dev/null) || continue
        echo "$path"
        exit 0
    done
done
