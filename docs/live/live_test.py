#!/usr/bin/env python3
"""Tests the live page in a headless Chromium: live_test.py <chromium> <live.html> <live_values> [<folder>]

It is told by pipes what to do (its DevTools protocol), as a reader would do it: by mouse, finger and keys.
Pictures of the page are put in the folder, for those who want to look.
"""
import base64
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

chromium, page, live_values = sys.argv[1:4]
pictures = Path(sys.argv[4]) if len(sys.argv) > 4 else None


class Browser:
    """A headless Chromium with one page; `events` are what it told without being asked."""

    def __init__(self, folder):
        ours, theirs = os.pipe(), os.pipe()  # what it reads and what it writes: its descriptors 3 and 4
        options = ["--headless=new", "--remote-debugging-pipe", f"--user-data-dir={folder}/profile",
                   "--no-first-run", "--disable-background-networking", "--disable-component-update",
                   "--hide-scrollbars"]
        if os.geteuid() == 0:
            options.append("--no-sandbox")  # Chromium refuses root its sandbox

        def descriptors():
            read, written = os.dup(ours[0]), os.dup(theirs[1])
            os.dup2(read, 3)
            os.dup2(written, 4)

        self.log = open(f"{folder}/log", "w")
        self.process = subprocess.Popen([chromium, *options, "about:blank"], preexec_fn=descriptors,
                                        close_fds=False, stdin=subprocess.DEVNULL, stdout=self.log,
                                        stderr=self.log)
        os.close(ours[0])
        os.close(theirs[1])
        self.to, self.of = ours[1], theirs[0]
        self.unread = b""
        self.events = []
        self.calls = 0
        self.session = None
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in "Page", "Runtime", "Log", "Network", "Accessibility":
            self.call(f"{domain}.enable")
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=folder, eventsEnabled=True)

    def call(self, method, **parameters):
        self.calls += 1
        message = {"id": self.calls, "method": method, "params": parameters}
        if self.session and not method.startswith(("Browser.", "Target.")):
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while (answer := self.read()).get("id") != self.calls:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def read(self):
        while b"\0" not in self.unread:
            if not select.select([self.of], [], [], 60)[0]:
                raise RuntimeError("the browser does not answer")
            got = os.read(self.of, 1 << 20)
            if not got:
                raise RuntimeError("the browser ended")
            self.unread += got
        message, self.unread = self.unread.split(b"\0", 1)
        return json.loads(message)

    def wait(self, method, condition=lambda parameters: True):
        """Until the browser tells of this event; what it told before counts."""
        while True:
            for event in self.events:
                if event.get("method") == method and condition(event["params"]):
                    return event["params"]
            self.events.append(self.read())

    def told(self, *methods):
        return [event for event in self.events if event.get("method") in methods]

    def evaluate(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def drawn(self):
        """After two frames what was asked for is on the screen."""
        self.evaluate("new Promise(f => requestAnimationFrame(() => requestAnimationFrame(f)))")

    def text(self, id):
        return self.evaluate(f"document.getElementById('{id}').textContent")

    def canvas(self, id):
        return self.evaluate(f"document.getElementById('{id}').toDataURL()")

    def box(self, id):
        return self.evaluate(f"(({{left, top, width, height}}) => ({{left, top, width, height}}))"
                             f"(document.getElementById('{id}').getBoundingClientRect())")

    def part(self, id):
        """How far a slider's thumb is from its left end, 0 to 1."""
        return self.evaluate(f"(e => (e.value - e.min) / (e.max - e.min))(document.getElementById('{id}'))")

    def press(self, key, times=1):
        codes = {"Tab": 9, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, " ": 32}
        for _ in range(times):
            for kind in "rawKeyDown", "keyUp":
                self.call("Input.dispatchKeyEvent", type=kind, key=key, code="Space" if key == " " else key,
                          windowsVirtualKeyCode=codes[key])
            if key == " ":
                break
        self.drawn()

    def screen(self, width, height, telephone=False, dark=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=telephone,
                  deviceScaleFactor=3 if telephone else 1)
        self.call("Emulation.setTouchEmulationEnabled", enabled=telephone)
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.evaluate("scrollTo(0, 0)")
        self.drawn()

    def picture(self, name):
        if pictures:
            pictures.mkdir(parents=True, exist_ok=True)
            for whole in False, True:
                data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
                (pictures / f"{name}{'_whole' if whole else ''}.png").write_bytes(base64.b64decode(data))

    def close(self):
        try:
            self.call("Browser.close")
            self.process.wait(20)
        except (OSError, RuntimeError, subprocess.TimeoutExpired):
            self.process.kill()
        self.log.close()


failures = []


def check(holds, what):
    print(f"{'ok    ' if holds else 'FAILED'} {what}", flush=True)
    if not holds:
        failures.append(what)


def drag(browser, id, to, finger=False):
    """Drags a slider's thumb there, 0 to 1, and looks that every step is drawn before the next."""
    browser.evaluate(f"document.getElementById('{id}').scrollIntoView({{block: 'center'}})")
    browser.drawn()
    box = browser.box(id)
    thumb = 16
    start, y = browser.part(id), box["top"] + box["height"] / 2

    def event(phase, part):
        x = box["left"] + thumb / 2 + part * (box["width"] - thumb)
        if finger:
            points = [] if phase == "End" else [{"x": x, "y": y}]
            browser.call("Input.dispatchTouchEvent", type=f"touch{phase}", touchPoints=points)
        else:
            kinds = {"Start": "mousePressed", "Move": "mouseMoved", "End": "mouseReleased"}
            browser.call("Input.dispatchMouseEvent", type=kinds[phase], x=x, y=y, button="left", buttons=1,
                         clickCount=1)

    event("Start", start)
    seen = [browser.canvas("row") + browser.canvas("growth")]
    steps = 5
    for i in range(1, steps + 1):
        event("Move", start + (to - start) * i / steps)
        browser.drawn()
        seen.append(browser.canvas("row") + browser.canvas("growth"))
    shown = browser.text(f"{id}-shown")
    event("End", to)
    browser.drawn()
    check(abs(browser.part(id) - to) < 0.03, f"{'finger' if finger else 'mouse'}: {id} is dragged to {to}")
    check(all(old != new for old, new in zip(seen, seen[1:])), f"every step of {id} is drawn while it is dragged")
    check(browser.text(f"{id}-shown") == shown, f"the value of {id} was shown while it was dragged: {shown}")
    check(box["top"] >= 0 and browser.box("row")["top"] > -1, f"the row is in sight while {id} is dragged")


RAISED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


def count(text):
    return int("".join(c for c in text if c.isdigit()))


def compare(browser, folder, what):
    """What the page saves against the native library, and what it shows against what it saves."""
    file = Path(folder, "ssmax.csv")
    file.unlink(missing_ok=True)
    browser.events = [e for e in browser.events if e.get("method") != "Browser.downloadProgress"]
    browser.evaluate("document.getElementById('save').click()")
    browser.wait("Browser.downloadProgress", lambda p: p["state"] == "completed")
    s, b = (browser.evaluate(f"document.getElementById('{id}').value") for id in "sb")
    result = subprocess.run([live_values, s, b], input=file.read_bytes(), capture_output=True)
    check(result.returncode == 0, f"{what}: {result.stdout.decode().strip()}")
    rows = [[float(x) for x in line.split(",")] for line in file.read_text().splitlines()[1:]]
    check(count(browser.text("n-counted")) == len(rows), f"{what}: n = {len(rows)} is shown")
    for column, name in (1, "softmax"), (2, "ssmax"):
        shown = browser.text(f"largest-{name}")
        largest = max(row[column] for row in rows)
        if "·" in shown:  # as 1.23·10⁻⁴
            value, within = float(shown.replace("·10", "e").translate(RAISED)), largest / 100
        else:
            value, within = float(shown), 0.5001e-4
        check(abs(value - largest) <= within, f"{what}: the largest of {name} is shown, {shown}")
        total = sum(row[column] for row in rows)
        check(abs(total - 1) < 1e-5 and abs(float(browser.text(f"sum-{name}")) - total) < 1e-6,
              f"{what}: {name} adds up")
    return rows


def fits(browser, what):
    """Nothing reaches out of the window, and no text of a control is cut."""
    outside = browser.evaluate("""[...document.querySelectorAll('body *')].filter(e => {
      const {left, right, width} = e.getBoundingClientRect();
      const out = left < -0.5 || right > document.documentElement.clientWidth + 0.5;
      return width > 0 && out || e.clientWidth > 0 && e.scrollWidth > e.clientWidth + 1;
    }).map(e => e.id || e.className || e.tagName)""")
    root = "document.documentElement"
    wider = browser.evaluate(f"{root}.scrollWidth > {root}.clientWidth")
    check(not outside and not wider, f"{what}: everything fits {' '.join(outside)}")


def type_numbers(browser, text):
    browser.evaluate("document.getElementById('numbers').select()")
    browser.call("Input.insertText", text=text)
    browser.drawn()


def load(browser):
    browser.events = [e for e in browser.events if e.get("method") != "Page.loadEventFired"]
    browser.call("Page.navigate", url=Path(page).resolve().as_uri())
    browser.wait("Page.loadEventFired")
    for _ in range(100):  # WebAssembly is compiled in the background
        if browser.text("n-counted"):
            break
        time.sleep(0.1)
    browser.drawn()


def test(browser, folder):
    browser.screen(1280, 900)
    load(browser)
    check(browser.evaluate("document.getElementById('failure').hidden"), "the page starts from a file")

    compare(browser, folder, "at first")
    check((browser.text("largest-softmax"), browser.text("largest-ssmax")) == ("0.1293", "0.9996"),
          "at first: what the README says")
    fits(browser, "1280 px")
    browser.picture("1280_light")

    drag(browser, "n", 1)
    rows = compare(browser, folder, "n = 100 000")
    check(len(rows) == 100_000, "n reaches 100 000")
    check(max(r[1] for r in rows) < 0.0015 and max(r[2] for r in rows) > 0.999, "Softmax fades, SSMax holds")
    drag(browser, "s", 0.1)
    drag(browser, "n", 0.35)
    drag(browser, "b", 0.7)
    drag(browser, "spread", 0.5)
    compare(browser, folder, "dragged")
    drag(browser, "large", 0.6)
    compare(browser, folder, "dragged on")

    # By keys alone: from the beginning of the page on, everything is reached, and every slider obeys.
    load(browser)
    reached = []
    for _ in range(14):
        browser.press("Tab")
        id = browser.evaluate("(e => e.id || e.type || e.tagName)(document.activeElement)")
        reached.append(id)
        if id in ("n", "large", "spread", "s", "b"):
            browser.press("Home")
            check(browser.part(id) == 0, f"keys: Home moves {id} to its beginning")
            before = browser.text(f"{id}-shown")
            browser.press("ArrowRight")
            check(browser.text(f"{id}-shown") != before, f"keys: an arrow moves {id} from {before}")
            browser.press("ArrowRight", 20)
        if id == "logarithmic":
            browser.press(" ")
            check(browser.evaluate("document.activeElement.checked"), "keys: the space bar ticks the box")
    check(reached[:10] == ["A", "generated", "n", "large", "spread", "s", "b", "logarithmic", "reset", "save"],
          f"keys: Tab reaches everything: {' '.join(reached[:10])}")
    compare(browser, folder, "by keys")
    browser.picture("1280_keys")
    browser.evaluate("document.querySelector('[type=reset]').click()")
    browser.drawn()
    check(browser.text("n-counted") == "n = 1000", "Begin again begins again")
    drag(browser, "n", 0.1)
    drag(browser, "b", 0)
    check("negative" in browser.text("note"), "a negative multiplier is explained")
    compare(browser, folder, "negative c")

    # The reader's own numbers.
    browser.evaluate("document.getElementById('own').click()")
    browser.drawn()
    compare(browser, folder, "own numbers, as they come")
    type_numbers(browser, "1.5, -2;.5\n3e0 −1 3")
    rows = compare(browser, folder, "own numbers")
    check([r[0] for r in rows] == [1.5, -2, 0.5, 3, -1, 3], "own numbers are read")
    browser.picture("1280_own")
    for text, error in (("1 2 x3", "Number 3, “x3”, is not a number."), ("", "Type at least two numbers."),
                        ("7", "Type at least two numbers."), ("1 nan", "Number 2, “nan”, is not a number."),
                        ("1 1e39", "Number 2, “1e39”, is too large for a float."),
                        ("0 " * 100_001, "These are 100\u202f001 numbers")):
        type_numbers(browser, text)
        marked = browser.evaluate("document.getElementById('numbers').getAttribute('aria-invalid')")
        check(browser.text("numbers-error").startswith(error) and marked == "true", f"an error is said: {error}")
        check(browser.text("n-counted") == "n = 6", "and the row before stays")
    browser.picture("1280_error")
    type_numbers(browser, "100000 -100000 99999.5")
    check(browser.text("numbers-error") == "", "a right row takes the error away")
    compare(browser, folder, "own large numbers")

    # A telephone, and the dark.
    for width in 390, 320:
        browser.screen(width, 844, telephone=True)
        browser.evaluate("document.querySelector('[type=reset]').click()")
        fits(browser, f"{width} px")
        browser.picture(f"{width}_light")
        drag(browser, "n", 0.9, finger=True)
        drag(browser, "s", 0.5, finger=True)
        compare(browser, folder, f"{width} px")
        browser.picture(f"{width}_dragged")
    browser.evaluate("document.getElementById('own').click()")
    browser.drawn()
    fits(browser, "320 px, own numbers")
    browser.evaluate("document.querySelector('[type=reset]').click()")
    light = browser.canvas("row")
    luminance = ("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3)"
                 ".reduce((sum, part) => sum + Number(part), 0)")
    check(browser.evaluate(luminance) > 600, "light")
    browser.screen(320, 844, telephone=True, dark=True)
    check(browser.evaluate(luminance) < 150 and browser.canvas("row") != light, "dark, the plots too")
    browser.screen(390, 844, telephone=True, dark=True)
    browser.picture("390_dark")
    browser.screen(1280, 900, dark=True)
    browser.picture("1280_dark")

    # What stands in a page is named for those who hear it.
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    for node in nodes:
        role, name = (node.get(key, {}).get("value") for key in ("role", "name"))
        if role in ("slider", "textbox", "button", "checkbox", "radio", "image", "link"):
            check(bool(name), f"{role} has the name “{name}”")

    said = browser.told("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
    check(not said, f"the console is empty {said or ''}")
    asked = {e["params"]["request"]["url"].split(":")[0] for e in browser.told("Network.requestWillBeSent")}
    check(asked <= {"file", "blob", "data"}, f"nothing is loaded from elsewhere: {' '.join(sorted(asked))}")


with tempfile.TemporaryDirectory() as folder:
    browser = Browser(folder)
    try:
        test(browser, folder)
    finally:
        browser.close()
print(f"{len(failures)} failed" if failures else "all is well")
sys.exit(1 if failures else 0)
