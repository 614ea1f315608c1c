for (const chart of document.querySelectorAll(".chart")) {
  const { x, first, last, names, rows } = JSON.parse(chart.dataset.chart);
  const plot = chart.querySelector(".plot"), tip = chart.querySelector(".tip");
  const cross = chart.querySelector(".cross");
  const hide = () => { tip.style.display = cross.style.display = "none"; };
  const show = (event) => {
    const box = plot.getBoundingClientRect();
    const at = first + (event.clientX - box.left) / box.width * (last - first);
    let low = 0, high = rows.length - 1;
    while (high - low > 1) {
      const mid = (low + high) >> 1;
      if (rows[mid][0] < at) low = mid; else high = mid;
    }
    const row = Math.abs(rows[low][0] - at) < Math.abs(rows[high][0] - at) ? rows[low] : rows[high];
    const left = last > first ? (row[0] - first) / (last - first) * 100 : 0;
    const lines = names.map((name, i) => row[i + 1] === null ? null
      : (names.length > 1 ? name + " " : "") + row[i + 1]).filter((line) => line !== null);
    tip.textContent = [x + " " + row[0], ...lines].join("\n");
    tip.style.display = cross.style.display = "block";
    cross.style.left = left + "%";
    tip.style.left = left < 50 ? `calc(${left}% + .5rem)` : "auto";
    tip.style.right = left < 50 ? "auto" : `calc(${100 - left}% + .5rem)`;
  };
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", hide);
}
