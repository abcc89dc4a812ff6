"use strict";
// Draws the charts, colours them as the page is coloured, and, on a live page, polls for updates.
(() => {
  const items = JSON.parse(document.getElementById("items").textContent);
  const drawn = new Map(); // name of a chart -> its bokeh document
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const INKS = {
    light: { muted: "#5b6470", line: "#c3cad3" },
    // Not lighter: a page that is dark on the screen is printed on white paper, and charts are not redrawn for that.
    dark: { muted: "#8b95a3", line: "#4a5563" },
  };

  function recolour(doc, inks) {
    for (const model of doc.all_models) {
      if (model.type.endsWith("Axis")) {
        model.setv({
          axis_label_text_color: inks.muted, major_label_text_color: inks.muted,
          axis_line_color: inks.line, major_tick_line_color: inks.line,
        });
      } else if (model.type === "Grid") {
        if (model.grid_line_color !== null) model.setv({ grid_line_color: inks.line });
      }
    }
  }

  function recolourAll() {
    for (const doc of drawn.values()) recolour(doc, dark.matches ? INKS.dark : INKS.light);
  }

  async function draw(name) {
    if (drawn.has(name) || !(name in items)) return;
    const views = await Bokeh.embed.embed_item(items[name], "chart-" + name);
    const doc = [...views.roots ?? views][0].model.document;
    drawn.set(name, doc);
    recolour(doc, dark.matches ? INKS.dark : INKS.light);
    // With a mouse, dragging zooms and a double click undoes it; a finger scrolls the page.
    if (window.matchMedia("(pointer: fine)").matches) {
      for (const model of doc.all_models) if (model.type === "BoxZoomTool") model.active = true;
      const place = document.getElementById("chart-" + name);
      place.addEventListener("dblclick", () => doc.roots()[0].reset.emit());
    }
  }

  function toggle(button) {
    const isOn = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(isOn));
    const doc = drawn.get(button.dataset.chart);
    if (doc === undefined) return;
    for (const model of doc.all_models) {
      if (model.name === button.dataset.series && "visible" in model) model.visible = isOn;
    }
  }

  function choose(tab) {
    for (const other of tab.parentElement.querySelectorAll("[role=tab]")) {
      const isChosen = other === tab;
      other.setAttribute("aria-selected", String(isChosen));
      other.tabIndex = isChosen ? 0 : -1;
      document.getElementById(other.getAttribute("aria-controls")).hidden = !isChosen;
    }
    drawInside(document.getElementById(tab.getAttribute("aria-controls")));
  }

  function drawInside(element) {
    return Promise.all([...element.querySelectorAll(".chart")].map((chart) => draw(chart.dataset.chart)));
  }

  function move(event) {
    const tabs = [...event.currentTarget.parentElement.querySelectorAll("[role=tab]")];
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step === undefined) return;
    const next = tabs[(tabs.indexOf(event.currentTarget) + step + tabs.length) % tabs.length];
    choose(next);
    next.focus();
  }

  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => toggle(button));
  }
  for (const tab of document.querySelectorAll("[role=tab]")) {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", move);
  }
  dark.addEventListener("change", recolourAll);
  window.addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
    // Charts keep the width that they have on the screen; on paper they are made smaller as pictures are.
    const width = document.querySelector("main").clientWidth;
    document.body.classList.toggle("two-columns", width > 820);
    document.body.style.setProperty("--print-zoom", String(Math.min(1, 680 / width)));
  });

  // A live page: the same charts again and again, with more in them.
  const status = document.getElementById("status");

  function feed(name, values) {
    const doc = drawn.get(name);
    for (const [source, columns] of Object.entries(values.sources)) {
      const model = doc?.get_model_by_name(source);
      if (model) model.data = numbers(columns);
    }
    const rows = doc?.get_model_by_name("rows");
    if (rows && values.rows.join("\n") !== rows.factors.join("\n")) rows.factors = values.rows;
    const reach = doc?.get_model_by_name("reach");
    if (reach && values.reach !== null) reach.end = values.reach;
  }

  function numbers(columns) {
    const gapped = (value) => (value === null ? NaN : value);
    return Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values.map(gapped)]));
  }

  function fill(rows) {
    const lines = document.querySelectorAll("#runs tbody tr");
    rows.forEach((row, line) => row.forEach((text, cell) => {
      const shown = lines[line].children[cell];
      if (shown.textContent !== text) shown.textContent = shown.title = text;
    }));
  }

  function say(text, state) {
    if (status.textContent !== text) status.textContent = text;
    status.className = state;
  }

  let failures = 0;

  async function poll() {
    let news;
    try {
      const answer = await fetch("/news.json", { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      news = await answer.json();
    } catch {
      failures += 1;
      say(failures < 4 ? "no answer; asking again" : "evenstep report --watch has ended; this is what it saw last", "lost");
      window.setTimeout(poll, 1000 * Math.min(failures, 10));
      return;
    }
    failures = 0;
    if (news.shape !== document.body.dataset.shape) {
      window.location.reload();
      return;
    }
    for (const [name, values] of Object.entries(news.charts)) feed(name, values);
    fill(news.runs);
    say(news.status, news.has_ended ? "ended" : "");
    // A run that has ended may be resumed in the same folder: polled less often.
    window.setTimeout(poll, news.has_ended ? 5000 : 1000);
  }

  const visible = [...document.querySelectorAll(".chart")].filter((chart) => chart.closest("[hidden]") === null);
  Promise.all(visible.map((chart) => draw(chart.dataset.chart))).then(() => {
    document.body.dataset.drawn = String(drawn.size);
    if (status !== null) poll();
  });
})();
