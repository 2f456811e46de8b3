#!/usr/bin/env python3
"""Checks that SSMAX_LAYOUT in config.hpp names the present layout of the data that a unit passes to ssmax::compiled.

    tests/layout.py            fails if the number is another one
    tests/layout.py --write    writes the number

The number is a hash of all declarations in namespace ssmax and ssmax::shared whose name carries the version alone
(SSMAX_BEGIN_DATA, SSMAX_BEGIN_SHARED), without comments, strings and spaces. The namespace of the library's functions
carries it. So a unit does not link a library with other layouts.
"""

import hashlib
import re
import sys
from pathlib import Path

INCLUDE = Path(__file__).resolve().parents[1] / "include/ssmax"
CONFIG = INCLUDE / "config.hpp"
LINE = re.compile(r"(?m)^#define SSMAX_LAYOUT (\w+)$")


def layout():
    declarations = []
    for header in sorted(INCLUDE.rglob("*.hpp")):
        text = re.sub(r'"(\\.|[^"\\])*"|//.*|/\*.*?\*/', "", header.read_text())
        for region in re.findall(r"(?ms)^SSMAX_BEGIN_(?:DATA|SHARED)$(.*?)^SSMAX_END$", text):
            declarations.append(re.sub(r"\s", "", region))
    return "x" + hashlib.sha1("\n".join(declarations).encode()).hexdigest()[:8]


def main():
    text, expected = CONFIG.read_text(), layout()
    found = LINE.search(text)[1]
    if "--write" in sys.argv:
        CONFIG.write_text(LINE.sub(f"#define SSMAX_LAYOUT {expected}", text))
    elif found != expected:
        sys.exit(f"config.hpp: SSMAX_LAYOUT is {found}, the declarations have {expected}: run tests/layout.py --write")


if __name__ == "__main__":
    main()
