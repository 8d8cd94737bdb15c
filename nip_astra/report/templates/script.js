"use strict";
// Finds, filters and sorts conversations and answers, and opens what a link leads to. Reading needs none of it.
(() => {
  const number = (element, name) =>
    element.dataset[name] === undefined || element.dataset[name] === "" ? null : Number(element.dataset[name]);
  const has = (element, name, place) => (element.dataset[name] || "").split(" ").includes(place);

  const reveal = () => {
    let target = null;
    try { target = document.getElementById(decodeURIComponent(location.hash.slice(1))); } catch { return; }
    if (!target || target.closest(".e[hidden]")) return;
    for (let one = target; one; one = one.parentElement) if (one.tagName === "DETAILS") one.open = true;
    target.scrollIntoView();
  };

  // All conversations of a table in one list, as they are when every one is to be looked at.
  const flatten = (list) => {
    const fold = list.querySelector(":scope > .fold");
    if (!fold) return;
    list.append(...fold.querySelectorAll(":scope > .e"));
    fold.remove();
  };

  const compare = {
    s: (a, b) => (number(b, "s") ?? -1) - (number(a, "s") ?? -1),
    r: (a, b) => (number(b, "r") ?? -Infinity) - (number(a, "r") ?? -Infinity),
    t: (a, b) => (number(a, "t") ?? Infinity) - (number(b, "t") ?? Infinity) || compare.s(a, b),
    "": (a, b) => a.played - b.played,
  };

  const arm = (tools) => {
    const section = tools.closest("section");
    const lists = [...section.querySelectorAll(".list")];
    const all = lists.flatMap((list) => [...list.querySelectorAll(".e")]);
    const tool = (name) => tools.querySelector(`[data-tool=${name}]`);
    const value = (name) => tool(name)?.value ?? "";
    const pad = (found) => found.padStart(12, "0");
    all.forEach((one, place) => { one.rank = place; });
    [...all].sort((a, b) => {
      const [one, other] = [a, b].map((e) => e.id.replace(/\d+/g, pad));
      return one < other ? -1 : one > other ? 1 : 0;
    }).forEach((one, place) => { one.played = place; });
    let order = value("order");

    const apply = () => {
      const words = value("words").trim().toLowerCase();
      const [from, to] = ["from", "to"].map((name) => (value(name) === "" ? null : Number(value(name))));
      const [plant, cluster] = [value("plant"), value("cluster")];
      const isFiltered = words || from !== null || to !== null || plant || cluster;
      if (isFiltered || value("order") !== order) lists.forEach(flatten);
      if (value("order") !== order) {
        order = value("order");
        for (const list of lists)
          list.append(...[...list.children].sort((a, b) => compare[order](a, b) || a.rank - b.rank));
      }
      let shown = 0;
      for (const one of all) {
        const score = number(one, "s");
        one.hidden = Boolean(
          (words && !(one.text ??= one.textContent.toLowerCase()).includes(words)) ||
          (from !== null && !(score >= from && score !== null)) ||
          (to !== null && !(score <= to && score !== null)) ||
          (plant && !has(one, "p", plant)) || (cluster && !has(one, "c", cluster)));
        shown += !one.hidden;
      }
      for (const list of lists) {
        const table = list.closest(".table");
        table.classList.toggle("nothing", list.querySelector(".e:not([hidden])") === null);
        if (isFiltered && !table.classList.contains("nothing")) table.open = true;
      }
      tools.querySelector("output").textContent =
        isFiltered ? `${shown} of ${all.length} conversations` : `${all.length} conversations`;
    };

    tools.addEventListener("input", apply);
    tool("reset").addEventListener("click", () => {
      tools.querySelectorAll("input").forEach((one) => { one.value = ""; });
      tools.querySelectorAll("select").forEach((one) => { one.selectedIndex = 0; });
      apply();
    });
    for (const link of document.querySelectorAll(`a.only[data-for="${tools.id}"]`))
      link.addEventListener("click", () => {
        tool("reset").click();
        tool("cluster").value = link.dataset.cluster;
        apply();
      });
    tools.hidden = false;
    apply();
  };

  // A list of problems: its items are data, of which a page at a time is drawn.
  const make = (name, className, content = "") => {
    const element = document.createElement(name);
    element.className = className;
    if (typeof content === "string") element.textContent = content; else element.append(...content);
    return element;
  };
  const badges = {
    fixed: "right", broken: "wrong", "right both times": "right", "wrong both times": "wrong",
    right: "right", wrong: "wrong",
    failure: "wrong", "failing now": "wrong", "failing both times": "wrong",
    "no failure": "right", "failing no more": "right", "never failing": "right",
  };
  const badge = (kind) => make("b", `end-${badges[kind] ?? "undecided"}`, kind);
  const messages = (rows, outcome = "") => rows.map(([role, said]) => {
    if (role === "reasoning") {
      return make("details", "fold", [make("summary", "", role), make("p", "said", said)]);
    }
    const one = make("span", ["assistant", "target"].includes(role) ? "w t" : "w a", said);
    one.dataset.role = role;
    if (outcome === "failure") [one.className, one.tabIndex] = [`${one.className} x`, 0];
    return one;
  });
  const draw = ([kind, title, note, prompt, sides]) => {
    const inside = note ? [make("p", "where said", note)] : [];
    inside.push(...messages(prompt));
    for (const [label, outcome, , facts, said] of sides) {
      const head = make("p", "where", [badge(outcome), ` ${label}${label ? ", " : ""}${facts}`]);
      inside.push(make("div", "n r0", [head, ...messages(said, outcome)]));
    }
    const summary = make("summary", "", [badge(kind), make("span", "said", title || "(empty)")]);
    return make("details", "e", [summary, make("div", "inside", inside)]);
  };
  const length = ([, , , , sides]) => sides[0][4].reduce((sum, [, said]) => sum + said.length, 0);
  const orders = {
    low: (a, b) => (a[4][0][2] ?? Infinity) - (b[4][0][2] ?? Infinity),
    high: (a, b) => (b[4][0][2] ?? -Infinity) - (a[4][0][2] ?? -Infinity),
    long: (a, b) => length(b) - length(a),
  };

  const page = (box) => {
    const every = JSON.parse(box.querySelector("script").textContent);
    const tool = (name) => box.querySelector(`[data-tool=${name}]`);
    const list = box.querySelector(".list");
    const size = Math.max(list.children.length, 1);
    let chosen = every, start = 0;
    const show = () => {
      list.replaceChildren(...chosen.slice(start, start + size).map(draw));
      const end = Math.min(start + size, chosen.length);
      box.querySelector("output").textContent =
        chosen.length ? `${start + 1} to ${end} of ${chosen.length}` : "none";
      tool("back").disabled = start === 0;
      tool("on").disabled = end === chosen.length;
    };
    const choose = () => {
      const [kind, order] = [tool("kind").value, tool("order").value];
      const words = tool("words").value.trim().toLowerCase();
      chosen = every.filter((one) =>
        (!kind || (kind.startsWith("every:") ? one[4][0][1] === kind.slice(6) : one[0] === kind)) &&
        (!words || (one.text ??= JSON.stringify([one[1], one[2], one[3], one[4].map((s) => s[4])]).toLowerCase()).includes(words)));
      if (order) chosen.sort(orders[order]);
      start = 0;
      show();
    };
    box.addEventListener("input", choose);
    tool("back").addEventListener("click", () => { start -= size; show(); });
    tool("on").addEventListener("click", () => { start += size; show(); });
    box.querySelector(".rest")?.remove();
    box.querySelector(".tools").hidden = false;
    choose();
  };

  document.querySelectorAll(".tools[id]").forEach(arm);
  document.querySelectorAll(".paged").forEach(page);

  // The page of a folder of runs: its table is filtered and sorted, and curves are of what it shows.
  const catalogue = (box) => {
    const curves = JSON.parse(box.querySelector("script").textContent);
    const body = box.querySelector("tbody"), svg = box.querySelector("svg");
    const rows = [...body.rows];
    const tool = (name) => box.querySelector(`[data-tool=${name}]`);
    // The curves that most runs have come first.
    const count = new Map();
    for (const title of curves.flatMap(Object.keys)) count.set(title, (count.get(title) ?? 0) + 1);
    for (const [title] of [...count].sort((a, b) => b[1] - a[1])) tool("curve").append(make("option", "", title));

    const part = (name, attributes, content) => {
      const element = document.createElementNS(svg.namespaceURI, name);
      for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
      if (content) element.textContent = content;
      svg.append(element);
      return element;
    };
    const short = (value) => String(Number(value.toPrecision(3)));
    const plot = (shown) => {
      const title = tool("curve").value;
      const lines = shown.map((row) => [row, curves[row.dataset.place][title] ?? []]);
      const points = lines.flatMap(([, line]) => line);
      svg.replaceChildren();
      for (const row of rows) row.querySelector(".dot").className = "dot";
      if (!points.length) return;
      const range = (place) => {
        const values = points.map((one) => one[place]);
        const [low, high] = [Math.min(...values), Math.max(...values)];
        return low < high ? [low, high] : [low - 0.5, high + 0.5];
      };
      const [[left, right], [low, high]] = [range(0), range(1)];
      const x = (value) => 56 + (value - left) / (right - left) * 410;
      const y = (value) => 212 - (value - low) / (high - low) * 200;
      for (const step of [0, 0.25, 0.5, 0.75, 1]) {
        const [across, up] = [left + step * (right - left), low + step * (high - low)];
        part("path", { class: "grid", d: `M56 ${y(up)}H466` });
        part("text", { x: 50, y: y(up) + 4, "text-anchor": "end" }, short(up));
        part("text", { x: x(across), y: 232, "text-anchor": "middle" }, short(across));
      }
      part("text", { x: 466, y: 250, "text-anchor": "end" }, "iteration");
      let color = 0;
      for (const [row, line] of lines) {
        if (!line.length) continue;
        color += 1;
        const own = color < 8 ? color : 0;
        if (own) row.querySelector(".dot").classList.add(`b${own}`);
        const d = line.map(([a, b], place) => `${place ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
        const drawn = part("path", { class: `line c${own}${own ? "" : " thin"}`, d });
        drawn.append(Object.assign(document.createElementNS(svg.namespaceURI, "title"),
          { textContent: row.cells[0].textContent }));
        if (line.length === 1) part("circle", { class: `d${own}`, cx: x(line[0][0]), cy: y(line[0][1]), r: 3 });
      }
    };
    const apply = () => {
      const words = tool("words").value.trim().toLowerCase();
      for (const row of rows)
        row.hidden = !row.textContent.toLowerCase().includes(words) ||
          ["trainer", "scenario", "status"].some((name) => tool(name).value && tool(name).value !== row.dataset[name]);
      const shown = [...body.rows].filter((row) => !row.hidden);
      box.querySelector("output").textContent = `${shown.length} of ${rows.length} runs`;
      plot(shown);
    };
    const key = (cell) => cell.dataset.v === undefined ? cell.textContent : cell.dataset.v === "" ? null : Number(cell.dataset.v);
    box.querySelectorAll("thead button").forEach((button, place) => {
      button.disabled = false;
      button.addEventListener("click", () => {
        const head = button.parentElement, isUp = head.getAttribute("aria-sort") !== "ascending";
        for (const one of head.parentElement.cells) one.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
        const order = (a, b) => {
          const [one, other] = [key(a.cells[place]), key(b.cells[place])];
          if (one === null || other === null) return (one === null) - (other === null);
          return (one < other ? -1 : one > other ? 1 : 0) * (isUp ? 1 : -1);
        };
        body.append(...[...body.rows].sort(order));
        apply();
      });
    });
    box.addEventListener("input", apply);
    tool("reset").addEventListener("click", () => {
      tool("words").value = "";
      for (const name of ["trainer", "scenario", "status"]) tool(name).value = "";
      apply();
    });
    box.querySelectorAll("[hidden]").forEach((one) => { one.hidden = false; });
    svg.removeAttribute("hidden");
    apply();
  };

  document.querySelectorAll(".catalogue").forEach(catalogue);
  addEventListener("hashchange", reveal);
  reveal();
})();
