#!/usr/bin/env python3
"""Writes the library as one file, ssmax.hpp, and its adaptors for Eigen as another, ssmax_eigen.hpp.

  single_header.py <folder to write to>

Every #include "…" gives way to the text of its file: the first time only if that has #pragma once, otherwise each
time, as for the compiler. So the texts of kernels, which for_each_target.inl includes by the name in SSMAX_KERNELS,
stand once for each instruction set.
"""

import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
HEADERS = REPOSITORY / "include" / "ssmax"
# A unit that has the kernels has the drivers: this holds but for SSMAX_COMPILED, which is refused.
ALWAYS = ["#if SSMAX_COMPILES_DRIVERS\n"]
REFUSAL = """#if defined(SSMAX_COMPILED)
// No such file: the compiler stops here.
#include "ssmax in one file holds its kernels, with SSMAX_COMPILED include the headers"
#endif

"""
KERNELS = re.compile(r"(SSMAX_(?:PAIR_|MATRIX_)?KERNELS)\b\s*(.*)")
DIRECTIVE = re.compile(r"#\s*(\w+)\s*(.*)")


class Expansion:
    def __init__(self):
        self.once = {}  # files with #pragma once: the conditions under which their text stands
        self.conditions = []  # of each #if that is open: its line, those of its #elif, its #else
        self.kernels = {}  # what SSMAX_KERNELS and its like stand for

    def text_of(self, path):
        source = path.read_text()
        if "\n#pragma once\n" in source:
            if path in self.once:
                if any(condition not in [ALWAYS, *self.conditions] for condition in self.once[path]):
                    sys.exit(f"{path}: included under {self.conditions}, its text is under {self.once[path]}")
                return ""
            self.once[path] = [list(lines) for lines in self.conditions]
        return "".join(self.text_of_line(line, path) for line in source.splitlines(keepends=True))

    def text_of_line(self, line, path):
        match = DIRECTIVE.fullmatch(line.strip())
        directive, rest = match.groups() if match else ("", "")
        if directive in ("if", "ifdef", "ifndef"):
            self.conditions.append([line])
        elif directive in ("elif", "else"):
            self.conditions[-1].append(line)
        elif directive == "endif":
            self.conditions.pop()
        elif directive == "pragma" and rest == "once":
            return ""
        elif directive in ("define", "undef") and (kernels := KERNELS.match(rest)):
            self.kernels[kernels[1]] = kernels[2]
            return ""
        elif directive == "include":
            name = rest.partition("//")[0].strip()
            name = self.kernels.get(name, name)
            included = (path.parent / name.strip('"')).resolve()
            if name.startswith('"') and included.is_file():  # config.hpp includes a message, which is none
                return self.text_of(included)
        return line


def write(path, purpose, text):
    version = ".".join(re.findall(r"#define SSMAX_VERSION_\w+ (\d+)", (HEADERS / "config.hpp").read_text()))
    head = f"ssmax {version}, {purpose}. Made by docs/packages/single_header.py.\n\n"
    head += (REPOSITORY / "LICENSE").read_text()
    head = "".join(f"// {line}".rstrip() + "\n" for line in head.splitlines())
    path.write_text(re.sub(r"\n{3,}", "\n\n", f"{head}#pragma once\n\n{text}"))


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    expansion = Expansion()
    write(folder / "ssmax.hpp", "in one file", REFUSAL + expansion.text_of(HEADERS / "ssmax.hpp"))
    eigen = expansion.text_of(HEADERS / "eigen.hpp")
    write(folder / "ssmax_eigen.hpp", "the adaptors for Eigen", f'#include "ssmax.hpp"\n\n{eigen}')


main()
