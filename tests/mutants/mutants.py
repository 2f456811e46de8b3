#!/usr/bin/env python3
"""Breaks the library one line at a time ("mutants") and finds out which tests notice.

    tests/mutants/mutants.py --list      shows the mutants
    tests/mutants/mutants.py             runs those that results.txt lacks

The script draws lines that the tests execute, in proportion to the executed lines of each folder, and adds the defects of
history.py. It works in build/mutants/tree, a clone of the last commit. For each mutant it runs first a few test files that
suit the changed file, then the stages of STAGES in order. It stops at the first failure.

A line of results.txt has the mutant's id, place, text, verdict and seconds. The id is a hash of file, old and new text.
To exclude a mutant that changes no result, replace its verdict by "equivalent: <reason>". The script then draws another.
"""

import argparse
import fcntl
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from history import past_defects

# Each stage: the preset that configures it, and the preset of build and test. The first stage is the README's command. The
# last two are long.
STAGES = {"readme": ("test", "test"), "full": ("test", "full"), "sanitize": ("sanitize", "sanitize"),
          "sanitize_rest": ("sanitize", "sanitize_rest"), "exhaustive": ("test", "exhaustive")}

# Test files of the first step: those whose names share words with the mutant's path, rare words first, then these.
FIRST_FILES = ["golden", "golden_backward", "attention", "decode", "softmax_hidden_rows", "attention_bfloat16"]
FIRST_COUNT = 10
SYNONYMS = {"bf16": "bfloat16", "pairs": "bfloat16", "matrix": "bfloat16 mask", "prefill": "attention", "check": "errors",
            "forward": "attention", "nonfinite": "nan hidden special", "visibility": "mask hidden", "simd": "exp half",
            "gather": "paged indexed", "call": "arguments", "sums": "threads backward", "checks": "errors",
            "rows": "softmax log", "route": "explain", "conversion": "half eight"}

# Test files and test spec of the coverage build.
COVERAGE = ("arguments|attention|attention_(backward|bfloat16|errors|hidden|masks|merge|nan|scores|short|sinks|source|state)|"
            "attention_backward_(bfloat16|bias|errors|masks|scores|short|special)|causal_short_rows|cross_entropy|decode|"
            "decode_(bfloat16|ring)|eight_bit|entmax|errors|execution|golden.*|token_lists|kv_cache|log.*|mask.*|"
            "online_softmax|paged_k.*|plan|q8_0|rope|rope_scaling|scaling.*|score|sequence_lengths|shared_keys|"
            "short_row_gradients|softmax_.*|special_values_nan|tree_mask|view", "~[exhaustive]~[slow]")

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests/mutants/results.txt"
WORK = ROOT / "build/mutants"
TREE = WORK / "tree"
HEADERS = TREE / "include/ssmax"
JOBS = os.cpu_count() or 2


class Mutant(NamedTuple):
    file: str  # below include/ssmax
    offset: int
    before: str
    after: str
    kind: str

    def id(self):
        return hashlib.sha1(f"{self.file}\n{self.text()}".encode()).hexdigest()[:8]

    def text(self):
        return f"{self.before.strip()} → {self.after.strip()}"

    def place(self):
        return f"{self.file}:{(HEADERS / self.file).read_text().count(chr(10), 0, self.offset) + 1}"


# ---- Commands. ---------------------------------------------------------------------------------------------


def run(command, folder=None, timeout=7200, env=None, stop=lambda: False):
    """Returns the exit status and the output of a command. The status of one that hangs or that `stop` ends is None."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(command, cwd=folder or TREE, stdout=output, stderr=subprocess.STDOUT, process_group=0,
                                   shell=isinstance(command, str), env={**os.environ, **(env or {})})
        end = time.time() + timeout
        try:
            while (status := process.poll()) is None and time.time() < end and not stop():
                time.sleep(0.05)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return status, output.read(10_000_000)


def must(command, folder=None):
    status, output = run(command, folder)
    if status != 0:
        sys.exit(f"Without a mutant, {command} ends with {status}:\n{output[-4000:]}")
    return output


def mirror(source, folder):
    """Makes `folder` a copy of `source`. Copies only the files of another size or time."""
    def files(root):
        return {os.path.join(os.path.relpath(path, root), name) for path, _, names in os.walk(root) for name in names}

    def state(path):
        found = os.lstat(path)
        return found.st_size, found.st_mtime_ns

    wanted, there = files(source), files(folder)
    for name in there - wanted:
        os.unlink(folder / name)
    for name in wanted:
        if name not in there or state(source / name) != state(folder / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).unlink(missing_ok=True)
            shutil.copy2(source / name, folder / name, follow_symlinks=False)


def refresh_tree():
    """Checks the commit of the user's checkout out into the clone, and returns the hashes of tests and headers."""
    must(["git", "init", "-q", str(TREE)], ROOT)
    must(["git", "fetch", "-q", "--depth", "1", f"file://{ROOT}", "HEAD"])
    must(["git", "checkout", "-qf", "--detach", "FETCH_HEAD"])
    return must(["git", "rev-parse", "HEAD:tests", "HEAD:include"]).split()


# ---- Mutants. ----------------------------------------------------------------------------------------------


def executed_lines(headers):
    """Returns the lines of each header that the tests execute, by gcov. A file in build/mutants keeps the lines."""
    cache, folder, (files, spec) = WORK / f"executed_{headers}.json", TREE / "build/coverage", COVERAGE
    if not cache.exists():
        must(["cmake", "--preset", "test", "-B", str(folder), "-DCMAKE_CXX_FLAGS_RELEASE=-Og --coverage",
              f"-DSSMAX_TEST_FILES={files}"])
        must(["ninja", "-C", str(folder), f"-j{JOBS}", "ssmax_tests"])
        for target in "scalar", "avx2", "avx512":
            run([folder / "tests/ssmax_tests", "~[attention]~[decode]" + spec], env={"SSMAX_TARGET": target})
        run([folder / "tests/ssmax_tests", f"[attention]{spec},[decode]{spec}"])
        lines = defaultdict(set)
        with ThreadPoolExecutor(JOBS) as pool:
            for _, output in pool.map(lambda data: run(["gcov", "-jt", str(data)], folder), folder.rglob("*.gcda")):
                for file in (f for text in output.splitlines() if text[:1] == "{" for f in json.loads(text)["files"]):
                    name = os.path.relpath(folder / file["file"], HEADERS)
                    lines[name] |= {line["line_number"] for line in file["lines"] if line["count"] > 0}
        cache.write_text(json.dumps({name: sorted(lines[name]) for name in sorted(lines) if name[:2] != ".."}))
    return json.loads(cache.read_text())


COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
OPERATORS = {"+": "-", "-": "+", "*": "/", "/": "*", "+=": "-=", "-=": "+=", "&&": "||", "||": "&&", "min": "max", "max": "min"}


def breaks_of(line):
    """Returns pairs of a kind and a broken line. The regular expressions rely on clang-format's spaces."""
    code = re.sub(r'"(\\.|[^"\\])*"', lambda m: " " * len(m[0]), line.split("//")[0]).rstrip()
    if re.match(r"\s*(#|template|requires|static_assert|SSMAX_ASSERT|using|case)", code) or code.endswith("\\"):
        return
    for m in re.finditer(r"(?<= )[-<>=!+*/&|]{1,2}(?= )|\b(min|max)(?=[<(])", code):
        for kind, table in ("comparison", COMPARISONS), ("operator", OPERATORS):
            if m[0] in table:
                yield kind, line[:m.start()] + table[m[0]] + line[m.end():]
    for m in re.finditer(r"(?<![.\w])\d+(?![.\w'])|(?<= < )\w+(?=;)", code):
        for change in 1, -1:
            bound = str(int(m[0]) + change) if m[0].isdigit() else f"{m[0]} {'+-'[change < 0]} 1"
            yield "bound", line[:m.start()] + bound + line[m.end():]
    if (re.match(r"\s*(\*?[\w.\[\]>-]+ [-+*/|&]?= .*|[\w.:>-]+(<.*>)?\(.*\)|(\+\+|--)\w+|continue|break);$", code)
            and code.count("(") == code.count(")")):
        yield "statement", re.match(r"\s*", line)[0] + "{}"
    for m in re.finditer(r"(?<!min|max|fma|mul|add)\((\w[\w.]*), (\w[\w.]*)(?=[,)])", code):
        if m[1] != m[2]:
            yield "arguments", f"{line[:m.start()]}({m[2]}, {m[1]}{line[m.end():]}"


def draw(executed, seed, count, verdicts):
    """Draws mutants. The place of a line in the draw depends on its text alone: a change elsewhere keeps the draw."""
    weights, drawn = Counter(), defaultdict(lambda: defaultdict(dict))
    for file, numbers in executed.items():
        lines = (HEADERS / file).read_text().splitlines(keepends=True)
        folder = "/".join(file.split("/")[:2]) if file.startswith("detail/") else "public headers"
        weights[folder] += len(numbers)
        for number in (n for n in numbers if n <= len(lines)):
            line, kinds = lines[number - 1].rstrip("\n"), defaultdict(list)
            for kind, broken in breaks_of(line):
                kinds[kind].append(broken)
            generator = random.Random(f"{seed} {file} {line}")
            kind = generator.choice(sorted(kinds) or [None])
            mutant = Mutant(file, len("".join(lines[:number - 1])), line, generator.choice(kinds[kind] or [line]), kind)
            if kind and not verdicts.get(mutant.id(), "").startswith(("does not compile", "equivalent")):
                drawn[folder][kind].setdefault(mutant.id(), (generator.random(), mutant))
    queues = {folder: sorted((i, *m) for found in kinds.values() for i, m in enumerate(sorted(found.values())))
              for folder, kinds in drawn.items()}  # the kinds of a folder take turns
    result, taken = [], Counter()
    while len(result) < count:  # the method of Sainte-Laguë, by which parties of any size get their seats
        folder = max(queues, key=lambda f: (taken[f] < len(queues[f])) * weights[f] / (2 * taken[f] + 1))
        result.append(queues[folder][taken[folder]][-1])
        taken[folder] += 1
    return result


# ---- Stages. -----------------------------------------------------------------------------------------------


def failure_in(output):
    """Returns the name of the first test case of Catch2 that fails."""
    found = re.search(r"^-{79}\n(.+)\n", output, re.M)
    return found[1].strip() if found else " ".join(output.split())[-80:]


def rank(mutant, objects):
    """Returns the test objects of the first step."""
    words = set(re.findall(r"[a-z0-9]+", mutant.file))
    words |= {word for key in words & set(SYNONYMS) for word in SYNONYMS[key].split()}
    names = {o: Path(o).name[:-len("_test.cpp.o")] for o in objects}
    frequency = Counter(word for name in names.values() for word in name.split("_"))
    score = {o: sum(1 / frequency[word] for word in set(name.split("_")) & words) for o, name in names.items()}
    suited = sorted((o for o in objects if score[o] > 0), key=lambda o: (-score[o], len(o)))[:FIRST_COUNT - 3]
    return (suited + [o for o in objects if names[o] in FIRST_FILES and o not in suited])[:FIRST_COUNT]


class Stage:
    def __init__(self, name, tests, headers):
        (self.configuration, self.preset), self.tested = STAGES[name], WORK / f"tested_{name}_{tests[:8]}_{headers[:8]}"
        self.folder, self.saved = TREE / "build" / self.configuration, WORK / "saved" / self.configuration

    def restore(self, only_first):
        """Restores the build folder without mutants. Builds and tests it before, if sources changed."""
        if self.saved.exists():
            mirror(self.saved, self.folder)
        changed = max(p.stat().st_mtime for p in HEADERS.rglob("*"))  # by a run that was killed, too
        if not self.tested.exists() or self.tested.stat().st_mtime < changed:
            must(["cmake", "--preset", self.configuration])
            must(["cmake", "--build", "--preset", self.preset, f"-j{JOBS}", *(["-t", "ssmax_tests"] if only_first else [])])
            if not only_first:
                must(["ctest", "--preset", self.preset, "--stop-on-failure"])
                self.tested.touch()
            mirror(self.folder, self.saved)

    def first_step(self, mutant):
        """Links the test files that suit the mutant and runs them as ctest would. Returns who fails, or None."""
        binary = "tests/ssmax_tests"
        inputs = re.findall(r"(?m)^    (?:\|+ )?(\S+[.](?:o|a))$", must(["ninja", "-t", "query", binary], self.folder))
        objects = [name for name in inputs if name.endswith("_test.cpp.o")]
        left_out = set(objects) - set(rank(mutant, objects))
        words = must(["ninja", "-t", "commands", "-s", binary], self.folder).split()
        link = " ".join(word for word in words if word not in left_out).replace(f"-o {binary}", "-o tests/first")
        build = ["ninja", f"-j{JOBS}", *[name for name in inputs if name not in left_out]]
        if run(build, self.folder)[0] != 0 or run(link, self.folder)[0] != 0:
            return "does not compile"
        tests, failures = json.loads(must(["ctest", "--preset", self.preset, "--show-only=json-v1"]))["tests"], []

        def run_test(test):
            properties = {p["name"]: p["value"] for p in test["properties"]}
            if properties.keys() & {"WILL_FAIL", "PASS_REGULAR_EXPRESSION"}:
                return
            env = dict(v.split("=", 1) for v in properties.get("ENVIRONMENT", []))
            status, output = run(["prlimit", f"--as={1 << 34}", self.folder / "tests/first", *test["command"][1:], "--abort"],
                                 timeout=200, env=env, stop=lambda: failures)
            if status not in (0, 77) and not failures and "No tests ran" not in output:
                failures.append(f"{test['name']}: {'a hang' if status is None else failure_in(output)}")

        with ThreadPoolExecutor(JOBS) as pool:
            list(pool.map(run_test, [t for t in tests if t.get("command", [""])[0] == str(self.folder / binary)]))
        return failures[0] if failures else None

    def whole(self):
        """Builds and tests all of the stage. Returns who fails, or None."""
        if run(["cmake", "--build", "--preset", self.preset, f"-j{JOBS}"])[0] != 0:
            return "does not compile"
        # mutants_history looks for the text that a past defect replaces.
        status, output = run(["ctest", "--preset", self.preset, "--stop-on-failure", "--timeout", "300", "-E", "^mutants_history$"])
        names = re.findall(r"(?m)^\s*\d+ - (\S+) \(", output)
        return None if status == 0 else f"{' '.join(names)}: {failure_in(output)}"


def verdict_of(mutant, stages, only_first):
    path = HEADERS / mutant.file
    original, times = path.read_text(), path.stat()
    for number, (name, stage) in enumerate(stages.items()):
        stage.restore(only_first)
        path.write_text(original[:mutant.offset] + mutant.after + original[mutant.offset + len(mutant.before):])
        try:
            found = number == 0 and stage.first_step(mutant) or not only_first and stage.whole()
        finally:
            path.write_text(original)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        if found:
            return found if found == "does not compile" else f"{name}: {found}"
        if only_first:
            return "passes the first step"
    return f"survived {' '.join(stages)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the mutants with context")
    parser.add_argument("--only", metavar="N", type=int, nargs="+", help="run these numbers of the list")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40, help="number of mutants, with those of history.py")
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=list(STAGES))
    parser.add_argument("--only-first", action="store_true", help="run the first test files alone, and record nothing")
    parser.add_argument("--stop-after-minutes", type=float, default=math.inf)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    end = time.time() + 60 * options.stop_after_minutes
    WORK.mkdir(parents=True, exist_ok=True)
    lock = (WORK / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a second run would change the tree of the first
    tests, headers = refresh_tree()
    executed, tried = executed_lines(headers), set()
    stages = {name: Stage(name, tests, headers) for name in options.stages}
    while True:
        lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
        verdicts = {line.split("\t")[0]: line.split("\t")[3] for line in lines}
        history = [Mutant(file, offset, before, after, f"fixed by {commit}")
                   for file, offset, before, after, commit in past_defects(HEADERS)]
        mutants = list(enumerate(draw(executed, options.seed, options.count - len(history), verdicts) + history, 1))
        chosen = [(i, m) for i, m in mutants if not options.only or i in options.only]
        for i, m in chosen if options.list else ():
            context = "\n".join((HEADERS / m.file).read_text()[:m.offset].split("\n")[-4:-1])
            print(f"[{i}/{len(mutants)}] {m.place()} ({m.kind}) {verdicts.get(m.id(), '')}\n{context}\n- {m.before}\n+ {m.after}\n")
        todo = [(i, m) for i, m in chosen if m.id() not in verdicts.keys() | tried]
        if options.list or not todo or time.time() > end:
            return
        number, mutant = todo[0]
        start = time.time()
        verdict = verdict_of(mutant, stages, options.only_first)
        seconds = f"{time.time() - start:.0f}"
        print(f"[{number}/{len(mutants)}] {mutant.place()} ({mutant.kind}) {mutant.text()}: {verdict} ({seconds} s)", flush=True)
        tried.add(mutant.id())
        if not options.only_first:
            with RESULTS.open("a") as results:
                results.write("\t".join([mutant.id(), mutant.place(), mutant.text(), verdict, seconds]) + "\n")


if __name__ == "__main__":
    main()
