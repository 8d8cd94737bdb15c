"use strict";
// Finds, filters and sorts conversations, and opens what a link leads to. Reading needs none of it.
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

  document.querySelectorAll(".tools").forEach(arm);
  addEventListener("hashchange", reveal);
  reveal();
})();
