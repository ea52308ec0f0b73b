// Draws each chart of a page when it comes into view: closed sections have no size.
const options = JSON.parse(document.getElementById("options").textContent);
const drawn = new Map();
const logarithmic = document.getElementById("logarithmic");  // not on every page

function isPositive(option) {
  return option.series.every((one) => one.type === "line" && one.data.every((point) => {
    const value = (Array.isArray(point) ? point : point.value)[1];
    return value === null || value > 0;
  }));
}

function scale(number) {
  const option = options[number];
  if (option.yAxis.type === "value" && isPositive(option)) {
    drawn.get(number).setOption({ yAxis: { type: logarithmic?.checked ? "log" : "value" } });
  }
}

const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const number = Number(target.dataset.panel);
    if (isIntersecting && !drawn.has(number)) {
      drawn.set(number, echarts.init(target));
      drawn.get(number).setOption(options[number]);
      scale(number);
      new ResizeObserver(() => drawn.get(number).resize()).observe(target);
    }
  }
}, { rootMargin: "300px" });
document.querySelectorAll(".chart").forEach((chart) => seen.observe(chart));
logarithmic?.addEventListener("change", () => drawn.forEach((_, number) => scale(number)));
