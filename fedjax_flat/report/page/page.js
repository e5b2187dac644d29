"use strict";
// Charts are drawn when they come into view, in the colours of the page, and all before printing.
(() => {
  const drawn = JSON.parse(document.getElementById("drawn").textContent);
  const places = [...document.querySelectorAll(".chart")];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const config = {
    displaylogo: false, responsive: true, showSendToCloud: false,
    modeBarButtonsToRemove: [
      "select2d", "lasso2d", "autoScale2d", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "zoom3d",
      "pan3d", "orbitRotation", "tableRotation", "resetCameraLastSave3d",
    ],
  };
  const hidden = new Set(); // "chapter/group"
  const hasWebGL = (() => {
    try { return !!document.createElement("canvas").getContext("webgl"); } catch { return false; }
  })();

  const merged = (a, b) => {
    const out = { ...a };
    for (const [k, v] of Object.entries(b || {})) {
      out[k] = v && typeof v === "object" && !Array.isArray(v) ? merged(out[k] || {}, v) : v;
    }
    return out;
  };

  const layoutOf = (own) => {
    const css = getComputedStyle(document.documentElement);
    const of = (name) => css.getPropertyValue(name).trim();
    const axis = {
      gridcolor: of("--grid"), zerolinecolor: of("--grid"), linecolor: of("--line"),
      automargin: true, title: { standoff: 8 },
    };
    const solid = { gridcolor: of("--grid"), backgroundcolor: "rgba(0,0,0,0)", color: of("--text") };
    const look = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      font: { color: of("--text"), size: 12, family: "system-ui, sans-serif" },
      margin: { l: 50, r: 14, t: 24, b: 44 }, hovermode: "closest",
      hoverlabel: { namelength: 40 }, xaxis: axis, yaxis: axis,
      modebar: { bgcolor: "rgba(0,0,0,0)", color: of("--soft"), activecolor: of("--text") },
    };
    if (own.scene) {
      look.scene = { xaxis: solid, yaxis: solid, zaxis: solid };
      look.margin = { l: 0, r: 0, t: 20, b: 0 };
    }
    return merged(look, own);
  };

  const key = (place, trace) =>
    `${place.closest(".chapter").dataset.chapter}/${trace.meta}`;

  const flat = (trace) => ({ // a surface where nothing can be drawn in three dimensions
    type: "heatmap", x: trace.x, y: trace.y, z: trace.z, zmin: trace.cmin, zmax: trace.cmax,
    colorscale: trace.colorscale, colorbar: trace.colorbar,
  });

  const draw = (place) => {
    const chart = drawn[places.indexOf(place)];
    let { data, layout } = chart;
    if (layout.scene && !hasWebGL) {
      data = data.map(flat);
      layout = {};
    }
    const traces = data.map((trace) =>
      trace.type === "scatter" || trace.type === "bar"
        ? { ...trace, visible: !hidden.has(key(place, trace)) } : trace);
    place.dataset.drawn = "yes";
    const printing = document.documentElement.classList.contains("printing");
    const size = printing ? { width: place.clientWidth, height: place.clientHeight } : {};
    return Plotly.react(place, traces, merged(layoutOf(layout), size), config);
  };

  const isDrawn = (place) => place.dataset.drawn === "yes";
  const again = () => places.filter(isDrawn).forEach(draw);
  // Browsers keep a few contexts for three dimensions only: those out of sight are let go.
  const letGo = (place) => {
    if (isDrawn(place) && drawn[places.indexOf(place)].layout.scene && hasWebGL) {
      Plotly.purge(place);
      place.dataset.drawn = "";
    }
  };
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting && !isDrawn(target)) draw(target);
      else if (!isIntersecting) letGo(target);
    }
  }, { rootMargin: "300px" });
  places.forEach((place) => {
    if (place.getBoundingClientRect().top < innerHeight) draw(place);
    watcher.observe(place);
  });
  document.documentElement.dataset.ready = Math.round(performance.now()); // milliseconds

  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const name = `${button.closest(".chapter").dataset.chapter}/${button.dataset.group}`;
      if (!hidden.delete(name)) hidden.add(name);
      button.setAttribute("aria-pressed", String(!hidden.has(name)));
      again();
    });
  }
  dark.addEventListener("change", again);
  addEventListener("beforeprint", () => {
    document.documentElement.classList.add("printing");
    document.querySelectorAll("details").forEach((d) => { d.open = true; });
    places.forEach(draw);
  });
  addEventListener("afterprint", () => {
    document.documentElement.classList.remove("printing");
    again();
  });
})();
