"use strict";
// Live pages: when the event stream /live reports a change, the page fetches itself again and htmx
// morphs the difference. Without this file the pages work too, but do not update themselves.
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

  const BASE = document.body.dataset.base;

  // --- light or dark -------------------------------------------------------------------------
  const theme = localStorage.getItem("theme");
  if (theme) document.documentElement.dataset.theme = theme;
  const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark";
  const switchTheme = () => {
    const next = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    localStorage.setItem("theme", next);
    chart.restyle();
  };

  // --- fetching the page again ----------------------------------------------------------------
  const REGIONS = ["#live", "#live-2"];
  const LEAST_MS = 700;
  let held = false, wanted = false, fetching = false, last = 0, timer = 0;

  const refresh = () => {
    if (held || document.hidden || !$("#live") || $("#live").dataset.frozen) return;
    wanted = true;
    if (fetching || timer) return;
    const least = Number($("#live").dataset.slow || LEAST_MS);
    timer = setTimeout(() => { timer = 0; update(); }, Math.max(0, least - (Date.now() - last)));
  };

  const update = async () => {
    if (held || !wanted) return;
    fetching = true; wanted = false; last = Date.now();
    try {
      const answer = await fetch(location.href, { headers: { "x-refresh": "1" } });
      if (answer.redirected && new URL(answer.url).pathname === `${BASE}/login`) return location.reload();
      if (answer.ok && $("#live").dataset.reload) return location.reload();
      if (!answer.ok) return;
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      for (const region of REGIONS) {
        const old = $(region), now = $(region, fresh);
        if (!old || !now || old.isEqualNode(now)) continue;
        const tail = $("#tail", old), follows = tail && tail.scrollTop + tail.clientHeight > tail.scrollHeight - 30;
        await htmx.swap({ text: now.outerHTML, target: old, swap: "outerMorph", sourceElement: old });
        if (follows) { const t = $("#tail"); t.scrollTop = t.scrollHeight; }
        show_cursor();
      }
      if (fresh.title) document.title = fresh.title;
      count_ticked(); poll_if_asked();
      document.body.dataset.refreshed = String(Number(document.body.dataset.refreshed || 0) + 1);
    } catch { /* #pulse shows that the gateway does not answer */ } finally {
      fetching = false;
      if (wanted) refresh();
    }
  };

  let poll = 0;
  const poll_if_asked = () => {
    clearTimeout(poll);
    const every = Number($("#live")?.dataset.poll || 0);
    if (every) poll = setTimeout(() => { refresh(); poll_if_asked(); }, every);
  };

  // --- the event stream -------------------------------------------------------------------------
  const pulse = (state, text) => {
    const shown = $("#pulse");
    if (shown && shown.dataset.state !== state) { shown.dataset.state = state; shown.textContent = text; }
  };
  let source = null, again_ms = 500;
  const listen = () => {
    if (!$("#pulse")) return;
    source = new EventSource(`${BASE}/live`);
    source.addEventListener("series", (event) => {
      again_ms = 500;
      pulse("live", "live");
      chart.set(JSON.parse(event.data).rows);
      refresh();
    });
    source.addEventListener("tick", (event) => {
      const tick = JSON.parse(event.data);
      chart.add(tick.rows);
      if (concerns(tick)) refresh();
    });
    source.onerror = () => {
      pulse("away", "reconnecting");
      // Reconnect ourselves: the browser gives up after an error status.
      source.close();
      setTimeout(listen, again_ms * (0.75 + Math.random() / 2));
      again_ms = Math.min(again_ms * 2, 5000);
    };
  };
  const concerns = (tick) => {
    const live = $("#live");
    if (!live || !tick.events) return false;
    const job = live.dataset.job;
    if (!job) return true;
    return tick.moved.length >= 200 || tick.moved.some(([queue, id]) => id === job && queue === live.dataset.jobQueue);
  };

  // --- the chart ------------------------------------------------------------------------------
  const chart = (() => {
    const KEPT = 900;
    let plot = null, data = [[], [], [], []];
    const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const make = () => {
      const place = $("#chart");
      if (!place || !data[0].length || !window.uPlot) return;
      if (plot) plot.destroy();
      const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
      const line = (label, name) => ({ label, stroke: colour(name), width: 1.5, points: { show: false } });
      plot = new uPlot({
        width: place.clientWidth - 14, height: 195, cursor: { y: false },
        scales: { y: { range: (_, low, high) => [0, Math.max(high * 1.1, 1)] } },
        series: [{}, line("submitted/s", "--seg-wait"), line("done/s", "--seg-good"), line("failed/s", "--seg-bad")],
        axes: [{ ...axis, values: (_, at) => at.map((s) => new Date(s * 1000).toTimeString().slice(0, 5)) }, { ...axis, size: 44 }],
      }, data, place);
    };
    return {
      set(rows) { data = [rows.map((r) => r[0]), rows.map((r) => r[1]), rows.map((r) => r[3]), rows.map((r) => r[4])]; make(); },
      add(rows) {
        if (!rows.length || !$("#chart")) return;
        for (const r of rows) { data[0].push(r[0]); data[1].push(r[1]); data[2].push(r[3]); data[3].push(r[4]); }
        const over = data[0].length - KEPT;
        if (over > 0) data = data.map((column) => column.slice(over));
        if (!held && !document.hidden) plot ? plot.setData(data) : make();
      },
      restyle() { make(); },
    };
  })();

  // --- ticking, copying, confirming --------------------------------------------------------------
  const count_ticked = () => { const shown = $("#ticked"); if (shown) shown.textContent = String($$('input[name="job"]:checked').length); };
  const hold = () => {
    held = !held;
    $("#hold").setAttribute("aria-pressed", String(held));
    $("#hold").textContent = held ? "go on" : "pause page";
    if (!held) refresh();
  };
  document.addEventListener("change", (event) => {
    if (event.target.id === "all") for (const tick of $$('input[name="job"]')) tick.checked = event.target.checked;
    if (event.target.name === "job" || event.target.id === "all") count_ticked();
  });
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.id === "theme") switchTheme();
    if (button.id === "hold") hold();
    if (button.id === "keys") $("#help").showModal();
    const text = button.dataset.copyText ?? (button.dataset.copy ? $(button.dataset.copy).textContent : null);
    if (text !== null && text !== undefined) {
      try { await navigator.clipboard.writeText(text); button.textContent = "copied"; } catch {
        const range = document.createRange();
        range.selectNodeContents($(button.dataset.copy) || button);
        getSelection().removeAllRanges(); getSelection().addRange(range);
        button.textContent = "press Ctrl-C";
      }
    }
    if (button.dataset.confirm && !confirm(button.dataset.confirm)) event.preventDefault();
  });

  // --- the keyboard -----------------------------------------------------------------------------
  const PAGES = { o: "/", j: "/jobs", q: "/queues", w: "/workers", d: "/dead", u: "/outbox", h: "/history", a: "/audit" };
  let going = false;
  const rows = () => $$("tr[data-href]");
  // The current row is known by its job, because a fetched page does not mark it. If the job is no
  // longer in the list, the row at the same place is used.
  const cursor = { href: "", place: -1 };
  const found = (all) => { const at = all.findIndex((row) => row.dataset.href === cursor.href); return at < 0 ? Math.min(cursor.place, all.length) : at; };
  const show_cursor = () => { for (const row of rows()) row.classList.toggle("at", row.dataset.href === cursor.href); };
  const move = (step) => {
    const all = rows();
    cursor.place = Math.max(0, Math.min(all.length - 1, found(all) + step));
    const next = all[cursor.place];
    cursor.href = next?.dataset.href ?? "";
    show_cursor();
    next?.querySelector("a")?.focus();
    next?.scrollIntoView({ block: "nearest" });
  };
  const on_row = (act) => { const row = rows().find((each) => each.dataset.href === cursor.href); if (row) act(row); };
  const KEYS = {
    "/": (event) => { const box = $("#q"); if (box) { event.preventDefault(); box.focus(); box.select(); } },
    j: () => move(1), k: () => move(-1),
    x: () => on_row((row) => { const tick = $('input[name="job"]', row); if (tick) { tick.checked = !tick.checked; count_ticked(); } }),
    g: () => { going = true; setTimeout(() => { going = false; }, 1500); },
    p: hold, t: switchTheme, "?": () => $("#help").showModal(),
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input:not([type=checkbox]), textarea, select, dialog")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (going && PAGES[event.key]) { location.assign(BASE + PAGES[event.key]); return; }
    KEYS[event.key]?.(event);
  });

  document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
  addEventListener("resize", () => chart.restyle());
  addEventListener("pagehide", () => source?.close());
  addEventListener("pageshow", (event) => { if (event.persisted) listen(); });
  count_ticked(); poll_if_asked(); listen();
})();
