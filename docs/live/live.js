// The live page: a row of logits, its probabilities under Softmax and SSMax, and the largest of them as n grows.
// The library computes all probabilities (live.cpp); here is what makes rows, draws and reads the controls.
"use strict";

(() => {
  const LONGEST_ROW = 100000;  // as in live.cpp
  const SMALL = -2;            // where the small logits lie, as in Figure 1 of the paper
  const NAMES = ["softmax", "ssmax"];
  const CALLED = {softmax: "Softmax", ssmax: "SSMax"};

  const element = (id) => document.getElementById(id);
  const say = (id, text) => {
    if (element(id).textContent !== text) element(id).textContent = text;
  };

  // ---- The library. ---------------------------------------------------------------------------------------

  async function load(base64) {
    const code = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
    let memory;
    // What C's library wants of its host: an empty environment, and somewhere to print to.
    const host = {
      environ_sizes_get: (count, size) => {
        new DataView(memory.buffer).setUint32(count, 0, true);
        new DataView(memory.buffer).setUint32(size, 0, true);
        return 0;
      },
      environ_get: () => 0,
      fd_write: () => 8,  // no such file
      fd_seek: () => 8,
      fd_close: () => 8,
      proc_exit: () => {
        throw new Error("the library refused its arguments");
      },
    };
    const {instance} = await WebAssembly.instantiate(code, {wasi_snapshot_preview1: host});
    const library = instance.exports;
    memory = library.memory;
    if (library._initialize) library._initialize();
    const first = library.live_rows();
    const row = (k) => new Float32Array(memory.buffer, first + 4 * LONGEST_ROW * k, LONGEST_ROW);
    return {
      logits: row(0),
      probabilities: {softmax: row(1), ssmax: row(2)},
      compute: (n, s, b) => {
        library.live_softmax(n);
        library.live_ssmax(n, s, b);
      },
    };
  }

  // ---- Rows: the large logit, and the others, of which a longer row has copies. ---------------------------

  // Numbers from -1 to 1 that look like chance and are the same each time.
  const scatter = new Float32Array(LONGEST_ROW - 1);
  for (let i = 0; i < scatter.length; ++i) {
    const turns = (i + 1) ** 2 * Math.SQRT2;
    scatter[i] = 2 * (turns - Math.floor(turns)) - 1;
  }

  // Rows of one kind differ by n alone. `write` puts the row where the library reads it.
  function generatedRow(n, large, spread) {
    const others = scatter.map((x) => SMALL + spread * x);
    const middle = n >> 1;
    const write = (to) => {
      to.set(others.subarray(0, middle));
      to[middle] = large;
      to.set(others.subarray(middle, n - 1), middle + 1);
    };
    return {kind: `${large} ${spread}`, n, large: Math.fround(large), others, write};
  }

  let ownRows = 0;
  function ownRow(numbers) {
    const large = numbers.reduce((x, y) => Math.max(x, y));
    const at = numbers.indexOf(large);
    const others = numbers.filter((_, i) => i !== at);
    return {kind: `own ${++ownRows}`, n: numbers.length, large, others, write: (to) => to.set(numbers)};
  }

  // The row made as long as can be: the large logit, and the others again and again.
  function writeGrown(row, to) {
    to[0] = row.large;
    to.set(row.others, 1);
    for (let end = 1 + row.others.length; end < to.length; end = 2 * end - 1) to.copyWithin(end, 1, end);
  }

  // The numbers in a text, as floats; throws what is wrong with it.
  const NUMBER = /^[-+−]?(\d+\.?\d*|\.\d+)(e[-+−]?\d+)?$/i;
  function parse(text) {
    const words = text.split(/[\s,;]+/).filter((word) => word !== "");
    if (words.length < 2) throw new Error("Type at least two numbers.");
    if (words.length > LONGEST_ROW) {
      const counts = [words.length, LONGEST_ROW].map(shownCount);
      throw new Error(`These are ${counts[0]} numbers; the page takes ${counts[1]}.`);
    }
    return Float32Array.from(words, (word, i) => {
      const which = `Number ${i + 1}, “${word.length > 20 ? word.slice(0, 20) + "…" : word}”,`;
      if (!NUMBER.test(word)) throw new Error(`${which} is not a number.`);
      const number = Math.fround(Number(word.replace(/−/g, "-")));
      if (!Number.isFinite(number)) throw new Error(`${which} is too large for a float.`);
      return number;
    });
  }

  // The steps of the slider n: all small numbers, then forty a decade, among them 100, 1000, …
  const lengths = [];
  for (let i = 0; i <= 200; ++i) {
    const exact = 10 ** (i / 40);
    const unit = 10 ** Math.max(0, Math.floor(i / 40) - 2);
    const n = Math.round(exact / unit) * unit;
    if (n >= 2 && n !== lengths[lengths.length - 1]) lengths.push(n);
  }

  // ---- How numbers are shown. -----------------------------------------------------------------------------

  const shownCount = (n) => n < 10000 ? `${n}` : `${n}`.replace(/\B(?=(\d{3})+$)/g, "\u202f");
  const shown = (x) => `${x}`.replace("-", "−");
  const power = (e) => "10" + `${e}`.replace(/./g, (c) => c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]);

  function shownProbability(p) {
    if (p === 0 || p >= 0.001) return p.toFixed(p === 0 ? 0 : 4);
    const [digits, exponent] = p.toExponential(2).split("e");
    return `${digits}·${power(Number(exponent))}`;
  }

  // ---- Drawing. -------------------------------------------------------------------------------------------

  // A canvas for the screen's pixels, and the colours of the page.
  function begin(canvas) {
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const style = getComputedStyle(canvas);
    const size = 0.8125 * parseFloat(style.fontSize);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = `${size}px ${style.fontFamily}`;
    context.lineJoin = "round";
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    return {context, width, height, size, colour};
  }

  function write(plot, text, x, y, {colour = "text", align = "left", base = "alphabetic", weight = ""} = {}) {
    const {context} = plot;
    context.save();
    context.font = `${weight} ${context.font}`;
    context.fillStyle = plot.colour(colour);
    context.textAlign = align;
    context.textBaseline = base;
    context.fillText(text, x, y);
    context.restore();
  }

  function line(plot, x0, y0, x1, y1, colour) {
    plot.context.fillStyle = plot.colour(colour);
    plot.context.fillRect(x0, y0, Math.max(1, x1 - x0), Math.max(1, y1 - y0));
  }

  // Where a probability lies between top and bottom. On a logarithmic axis, below 10⁻⁸ is at the bottom.
  const DECADES = 8;
  function probabilityAxis(plot, area, logarithmic) {
    const height = area.bottom - area.top;
    const part = logarithmic ? (p) => Math.max(0, 1 + Math.log10(p) / DECADES) : (p) => p;
    const y = (p) => area.bottom - height * Math.min(1, part(p));
    const few = height < 9 * plot.size;
    const ticks = logarithmic ? (few ? [0, 4, 8] : [0, 2, 4, 6, 8]).map((e) => [10 ** -e, e ? power(-e) : "1"])
                              : (few ? [0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1]).map((p) => [p, `${p}`]);
    for (const [p, text] of ticks) {
      line(plot, area.left, Math.round(y(p)), area.right, 0, "line");
      write(plot, text, area.left - 6, y(p), {colour: "faint", align: "right", base: "middle"});
    }
    return y;
  }

  function triangle({context}, x, y, size) {
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x - size, y - 1.4 * size);
    context.lineTo(x + size, y - 1.4 * size);
    context.fill();
  }

  // Bars of the row, Softmax's above SSMax's. Of more logits than there is room for, each bar is the largest of
  // some; how many is returned. On the right is what they make together, the large logit's part and the rest.
  function drawRow(canvas, row, logits, results, titles, logarithmic) {
    const plot = begin(canvas);
    const {context, size} = plot;
    const left = 3.2 * size, right = plot.width - (logarithmic ? 0.5 : 4) * size;
    const above = 2.4 * size, between = 0.9 * size, below = 1.6 * size;
    const height = (plot.height - 2 * above - between - below) / 2;
    const width = right - left;
    const bars = Math.min(row.n, Math.floor(width / 2));
    const step = width / bars;
    const thickness = step < 4 ? step : Math.min(40, 0.75 * step);
    const marked = [];
    for (let i = 0; i < row.n; ++i) {
      if (logits[i] === row.large) marked.push(i);
    }

    NAMES.forEach((name, k) => {
      const {p, largest, sum} = results[name];
      const top = above + k * (height + above + between), bottom = top + height;
      write(plot, titles[name], 0, top - 1.4 * size, {colour: name, weight: "600"});
      write(plot, `largest ${shownProbability(largest)}`, plot.width, top - 1.4 * size, {align: "right"});
      const y = probabilityAxis(plot, {left, right, top, bottom}, logarithmic);
      const bar = (x, value, thick) => context.fillRect(x - thick / 2, y(value), thick, bottom - y(value));
      context.fillStyle = plot.colour(name);
      context.globalAlpha = 0.5;
      for (let i = 0; i < bars; ++i) {
        const end = Math.floor((i + 1) * row.n / bars);
        let value = 0;
        for (let j = Math.floor(i * row.n / bars); j < end; ++j) value = Math.max(value, p[j]);
        if (row.n > bars || logits[i] !== row.large) bar(left + (i + 0.5) * step, value, thickness);
      }
      const stack = right + 2.6 * size;
      if (!logarithmic) bar(stack, sum, 1.6 * size);
      context.globalAlpha = 1;
      marked.slice(0, 20).forEach((i) => {
        const x = left + (i + 0.5) * width / row.n;
        bar(x, p[i], Math.max(3, thickness));
        triangle(plot, x, y(p[i]) - 2, 0.4 * size);
      });
      if (!logarithmic) {
        bar(stack, marked.reduce((part, i) => part + p[i], 0), 1.6 * size);
        if (k === 1) write(plot, "all", stack, bottom + 1.2 * size, {align: "center", colour: "faint"});
      }
      line(plot, left, bottom, right, bottom + 1, "faint");
    });

    const y = plot.height - below + 1.2 * size;
    const label = (text, x, align) => write(plot, text, x, y, {align, colour: "faint"});
    if (row.n <= 12) {
      for (let i = 0; i < row.n; ++i) {
        label(shown(Number(logits[i].toPrecision(3))), left + (i + 0.5) * step, "center");
      }
    } else {
      label("1", left, "left");
      if (width > 17 * size) label("place in the row", (left + right) / 2, "center");
      label(shownCount(row.n), right, "right");
    }
    return Math.ceil(row.n / bars);
  }

  // The largest probability against n, and a mark at the present n.
  function drawGrowth(canvas, n, curves, logarithmic) {
    const plot = begin(canvas);
    const {context, size} = plot;
    const area = {left: 3.2 * size, right: plot.width - 2 * size,
                  top: 2.3 * size, bottom: plot.height - 3.2 * size};
    const y = probabilityAxis(plot, area, logarithmic);
    const span = Math.log(LONGEST_ROW / 2);
    const x = (count) => area.left + (area.right - area.left) * Math.log(count / 2) / span;
    for (let count = 10; count <= LONGEST_ROW; count *= 10) {
      line(plot, Math.round(x(count)), area.top, 0, area.bottom, "line");
      const short = plot.width < 26 * size && count > 10;
      const text = short ? power(Math.round(Math.log10(count))) : shownCount(count);
      write(plot, text, x(count), area.bottom + 1.3 * size, {align: "center", colour: "faint"});
    }
    write(plot, "2", area.left, area.bottom + 1.3 * size, {align: "center", colour: "faint"});
    write(plot, "n, on a logarithmic axis", (area.left + area.right) / 2, area.bottom + 2.8 * size,
          {align: "center", colour: "faint"});
    line(plot, x(n), area.top, 0, area.bottom, "faint");

    let legend = 0;
    NAMES.forEach((name, k) => {
      const points = curves[name];
      context.strokeStyle = context.fillStyle = plot.colour(name);
      context.lineWidth = 2.5;
      context.setLineDash(k === 0 ? [7, 4] : []);
      context.beginPath();
      points.forEach((point) => context.lineTo(x(point.n), y(point.largest)));
      context.stroke();
      context.beginPath();
      context.moveTo(legend, 0.7 * size);
      context.lineTo(legend + 2.2 * size, 0.7 * size);
      context.stroke();
      context.setLineDash([]);
      write(plot, CALLED[name], legend + 2.7 * size, 0.7 * size, {colour: name, base: "middle", weight: "600"});
      legend += context.measureText(CALLED[name]).width + 5 * size;
      // Softmax has a disc, SSMax a square.
      const here = points.find((point) => point.n === n);
      const r = 0.42 * size;
      context.fillStyle = plot.colour(name);
      context.beginPath();
      if (k === 0) context.arc(x(n), y(here.largest), r, 0, 7);
      else context.rect(x(n) - r, y(here.largest) - r, 2 * r, 2 * r);
      context.fill();
    });
  }

  // ---- The page. ------------------------------------------------------------------------------------------

  function start(library) {
    const form = document.querySelector("form");
    element("n").max = lengths.length - 1;
    element("n").defaultValue = lengths.indexOf(1000);

    const value = (id) => Number(element(id).value);
    let own = null;  // the reader's last row that was right

    function readOwn() {
      let error = "";
      try {
        own = ownRow(parse(element("numbers").value));
      } catch (problem) {
        error = problem.message + (own ? " The row before is still shown." : "");
      }
      say("numbers-error", error);
      element("numbers").setAttribute("aria-invalid", error !== "");
    }

    // The sum of all, and the sum without the largest: their difference would not show what is below 1e-7.
    function sumsOf(p, n, largest) {
      const at = p.indexOf(largest);
      let rest = 0;
      for (let i = 0; i < n; ++i) if (i !== at) rest += p[i];
      return {sum: rest + largest, rest};
    }

    function largestOf(p, n) {
      let largest = 0;
      for (let i = 0; i < n; ++i) largest = Math.max(largest, p[i]);
      return largest;
    }

    // Largest probabilities of the row as it grows; computed anew only where more than its n has changed.
    let grown = {};
    function growth(row, s, b) {
      const key = `${row.kind} ${s} ${b}`;
      if (grown.key === key) return grown;
      grown = {key, softmax: [], ssmax: []};
      writeGrown(row, library.logits);
      for (const n of lengths.filter((n, i) => n < 500 || i % 4 === 0 || n === LONGEST_ROW)) {
        library.compute(n, s, b);
        for (const name of NAMES) grown[name].push({n, largest: largestOf(library.probabilities[name], n)});
      }
      return grown;
    }

    function showControls(length, large, spread, s, b) {
      for (const field of document.querySelectorAll(".generated")) field.hidden = element("own").checked;
      document.querySelector(".field.own").hidden = !element("own").checked;
      say("n-shown", shownCount(length));
      say("large-shown", shown(large));
      say("spread-shown", spread === 0 ? `all ${shown(SMALL)}` : `${shown(SMALL)} ± ${shown(spread)}`);
      say("s-shown", shown(s));
      say("b-shown", shown(b));
      // What is heard of these two, whose values are not what they stand for.
      element("n").setAttribute("aria-valuetext", `${length}`);
      element("spread").setAttribute("aria-valuetext", element("spread-shown").textContent);
    }

    // What is computed of the row that stands before the library.
    function resultOf(name, n) {
      const p = library.probabilities[name];
      const largest = largestOf(p, n);
      return {p, largest, ...sumsOf(p, n, largest)};
    }

    function showNumbers(row, c, results) {
      say("n-counted", `n = ${shownCount(row.n)}`);
      say("c-softmax", "1");
      say("c-ssmax", shown(c.toFixed(3)));
      for (const name of NAMES) {
        say(`largest-${name}`, shownProbability(results[name].largest));
        say(`others-${name}`, shownProbability(results[name].rest));
        say(`sum-${name}`, results[name].sum.toFixed(6));
      }
      say("note", c < 0 ? "c is negative: under SSMax the smallest logit gets the most."
                : c === 0 ? "c is 0: under SSMax all logits weigh the same." : "");
    }

    let rowShown;  // what "Save as CSV" saves

    function show() {
      const length = lengths[value("n")];
      const large = value("large"), spread = value("spread"), s = value("s"), b = value("b");
      const logarithmic = element("logarithmic").checked;
      showControls(length, large, spread, s, b);

      const row = element("own").checked && own ? own : generatedRow(length, large, spread);
      const curves = growth(row, s, b);
      row.write(library.logits);
      library.compute(row.n, s, b);
      const results = {softmax: resultOf("softmax", row.n), ssmax: resultOf("ssmax", row.n)};
      const c = s * Math.log(row.n) + b;
      showNumbers(row, c, results);

      const titles = {softmax: "Softmax", ssmax: `SSMax, c = ${shown(c.toFixed(3))}`};
      const neighbours = drawRow(element("row"), row, library.logits, results, titles, logarithmic);
      say("row-hint", (neighbours > 1 ? `A bar is the largest of up to ${neighbours} neighbours. ` : "") +
                      `▼ marks the ${row === own ? "largest" : "large"} logit, drawn in full colour.` +
                      (logarithmic ? "" : " The bar “all” stacks the whole row."));
      const lines = {};
      for (const name of NAMES) {
        const others = curves[name].filter(({n}) => n !== row.n);
        lines[name] = [...others, {n: row.n, largest: results[name].largest}].sort((x, y) => x.n - y.n);
      }
      drawGrowth(element("growth"), row.n, lines, logarithmic);
      say("growth-hint", row === own
          ? "For other n than your row’s: your largest number among copies of your others."
          : "As in Figure 1 of the paper. SSMax holds where s is above 1 / (large logit − small logits).");
      const both = NAMES.map((name) => `${CALLED[name]} ${shownProbability(results[name].largest)}`).join(", ");
      element("row").setAttribute("aria-label", `Probabilities of ${row.n} logits. The largest: ${both}.`);
      element("growth").setAttribute("aria-label", `Largest probability against n. At n = ${row.n}: ${both}.`);
      rowShown = row;
    }

    let waiting = false;
    function showSoon() {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => {
        waiting = false;
        show();
      });
    }

    // Nine digits say which float it is.
    function save() {
      const {softmax, ssmax} = library.probabilities;
      const lines = ["logit,softmax,ssmax"];
      for (let i = 0; i < rowShown.n; ++i) {
        lines.push([library.logits[i], softmax[i], ssmax[i]].map((x) => Number(x.toPrecision(9))).join(","));
      }
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([lines.join("\n") + "\n"], {type: "text/csv"}));
      link.download = "ssmax.csv";
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    }

    element("numbers").addEventListener("input", readOwn);
    element("own").addEventListener("change", () => {
      if (element("numbers").value.trim() === "") element("numbers").value = "3 -2 0.5 -1.5 -2";
      readOwn();
    });
    form.addEventListener("input", showSoon);
    form.addEventListener("change", showSoon);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => {
      own = null;
      say("numbers-error", "");
      element("numbers").setAttribute("aria-invalid", false);
      showSoon();  // after the form itself
    });
    element("save").addEventListener("click", save);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showSoon);
    new ResizeObserver(showSoon).observe(element("row"));
    new ResizeObserver(showSoon).observe(element("growth"));
    form.reset();
  }

  load(element("wasm").textContent).then(start).catch((problem) => {
    element("failure").hidden = false;
    say("failure", `The page did not start: ${problem.message}. It needs WebAssembly with SIMD.`);
  });
})();
