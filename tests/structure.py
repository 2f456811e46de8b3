#!/usr/bin/env python3
"""Measures the structure of the library's headers, and checks it.

    tests/structure.py [REPOSITORY] [--list]

Prints the figures, and with --list the functions behind them. Fails at an include against the order of folders, a circle
of headers, and a figure above its limit. A code line holds more than a comment. Declarations and definitions count.
"""

import re
import sys
from pathlib import Path

# A folder includes only itself and folders before it. Other folders, and public headers, are not in an order.
ORDER = ["terms", "operands", "tile", "forward", "work", "backward", "desk"]
MOST_PARAMETERS, MOST_LINES = 7, 80
LIMITS = {"functions with more than 7 parameters": 5, "functions of more than 80 lines": 0}
# A driver's declaration ends with its definition in units that compile drivers.
DRIVERS = {"driver.hpp"}


def without_comments(text):
    """Returns the text with comments, strings and directives blanked. Lines keep their numbers."""
    def blank(match):
        return re.sub(r"[^\n]", " ", match.group(0))
    text = re.sub(r'"(\\.|[^"\\\n])*"|\'(\\.|[^\'\\\n])\'|//[^\n]*|/\*.*?\*/', blank, text, flags=re.S)
    return re.sub(r"(?m)^[ \t]*#(.*\\\n)*.*$", blank, text)


def closing(text, at, brackets="()"):
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == brackets[0]) - (text[i] == brackets[1])
        if depth == 0:
            break
    return i


def count_parameters(text):
    """Returns the number of parameters in the text between the brackets of a parameter list."""
    for inner in (r"\([^()]*\)", r"\{[^{}]*\}", r"<[^<>]*>"):
        while re.search(inner, text):
            text = re.sub(inner, " ", text)
    return text.count(",") + 1 if text.strip() else 0


def functions(text):
    """Returns (name, parameters, lines of the body) of every function that the text declares or defines."""
    found = []
    keywords = {"if", "for", "while", "switch", "return", "sizeof", "decltype", "requires", "noexcept", "static_assert"}
    for match in re.finditer(r"(operator\s*[^\s\w(]+|operator\(\)|~?\b[A-Za-z_]\w*)\s*\(", text):
        name = match.group(1)
        if name in keywords:
            continue
        opening = match.end() - 1
        end = closing(text, opening)
        rest = re.match(r"(\s*(const|override|final|noexcept|&&|&))*(\s*requires\s*\([^{;]*\))?(\s*->\s*[^;{]+?)?\s*(?<!:)(:(?!:)|[{;]|=\s*(0|default|delete)\s*;)",
                        text[end + 1:end + 400])
        before = text[:match.start()].rstrip()
        is_call = not before or before[-1] in "=(,!?&|+-/%[.:" or re.search(r"\b(return|else|throw|case)$", before)
        if rest is None or is_call:
            continue
        tail = rest.group(5)
        if tail[0] in ";=" and not re.search(r"[\w>*&]$", before):  # a declaration follows the type of its result
            continue
        lines = 0
        if tail[0] in ":{":
            start = text.find("{", end)
            if tail[0] == ":":  # initialisers of members
                at = end + 1
                while True:
                    nxt = re.compile(r"\s*[:,]\s*[\w:<>,\s.]*?([({])").match(text, at)
                    if nxt is None:
                        break
                    at = closing(text, nxt.end() - 1, "()" if nxt.group(1) == "(" else "{}") + 1
                start = text.find("{", at)
            body = closing(text, start, "{}")
            lines = text.count("\n", start, body) - 1
        found.append((name, count_parameters(text[opening + 1:end]), lines, text.count("\n", 0, match.start()) + 1))
    return found


def circles(edges):
    """Returns the sets of nodes that reach each other."""
    def reach(start):
        seen, todo = set(), [start]
        while todo:
            new = edges.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        return seen
    of = {node: reach(node) for node in edges}
    return {", ".join(sorted(str(b) for b in of[a] if a in of.get(b, ()))) for a in edges if a in of[a]}


def main():
    arguments = [a for a in sys.argv[1:] if not a.startswith("--")]
    root = Path(arguments[0] if arguments else Path(__file__).resolve().parents[1]).resolve() / "include/ssmax"
    headers = {h: h.read_text() for h in sorted(root.rglob("*")) if h.suffix in (".hpp", ".inl")}
    code = sum(len(re.findall(r"(?m)^(?!\s*(?://.*)?$).", text)) for text in headers.values())
    edges, folders, up, long_lists, long_bodies = {}, {}, [], {}, {}
    for header, text in headers.items():
        targets = {(header.parent / name).resolve() for name in re.findall(r'(?m)^\s*#\s*include "([^"]+)"', text)}
        is_driver = header.name in DRIVERS
        edges[header.relative_to(root)] = {t.relative_to(root) for t in targets
                                           if t in headers and not (is_driver and t.name != "driver.hpp" and t.parent == header.parent)}
        own = header.parent.name
        for target in targets & headers.keys():
            other = target.parent.name
            if own != other and own in ORDER and other in ORDER:
                folders.setdefault(own, set()).add(other)
                if ORDER.index(other) > ORDER.index(own):
                    up.append(f"{header.relative_to(root)} -> {target.relative_to(root)}")
        for name, parameters, lines, line in functions(without_comments(text)):
            place = f"{header.relative_to(root)}:{line}: {name}"
            if parameters > MOST_PARAMETERS:
                long_lists[place] = parameters
            if lines > MOST_LINES:
                long_bodies[place] = lines
    figures = {"code lines": code, "headers": len(headers), "functions with more than 7 parameters": len(long_lists),
               "functions of more than 80 lines": len(long_bodies)}
    print("\n".join(f"{what:40}{number:7}" for what, number in figures.items()))
    if "--list" in sys.argv:
        print("\n".join(f"{number:5}  {place}" for place, number in [*long_lists.items(), *long_bodies.items()]))
    wrong = [f"{what}: {figures[what]}, at most {limit}" for what, limit in LIMITS.items() if figures[what] > limit]
    wrong += [f"circle: {circle}" for circle in circles(edges) | circles(folders)]
    wrong += [f"against the order of folders: {arrow}" for arrow in up]
    if wrong:
        sys.exit("\n".join(wrong))


main()
