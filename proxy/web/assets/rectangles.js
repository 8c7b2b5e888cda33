// Divides a rectangle into parts of given sizes that are as square as possible (Bruls, Huizing, van Wijk:
// Squarified Treemaps, 2000). Knows nothing of what the parts are.

// Returns a rectangle {x, y, width, height} for each of *sizes*, which are positive and descending.
export function divide(sizes, { x, y, width, height }) {
  const whole = sizes.reduce((sum, size) => sum + size, 0);
  const scale = whole ? (width * height) / whole : 0;
  const areas = sizes.map((size) => size * scale);
  const parts = [];
  let rest = { x, y, width, height };
  while (parts.length < areas.length) {
    const side = Math.min(rest.width, rest.height);
    const row = nextRow(areas.slice(parts.length), side);
    rest = layRow(row, rest, parts);
  }
  return parts;
}

// Returns the areas that lie side by side: one more as long as that makes none of them slimmer.
function nextRow(areas, side) {
  const row = [areas[0]];
  while (row.length < areas.length && slimmest([...row, areas[row.length]], side) <= slimmest(row, side)) {
    row.push(areas[row.length]);
  }
  return row;
}

function slimmest(row, side) {
  const sum = row.reduce((total, area) => total + area, 0);
  return Math.max((side * side * row[0]) / (sum * sum), (sum * sum) / (side * side * row.at(-1)));
}

// Lays a row along the shorter side, and returns what is left of the rectangle.
function layRow(row, { x, y, width, height }, parts) {
  const sum = row.reduce((total, area) => total + area, 0);
  const isUpright = height <= width;
  const depth = sum / (isUpright ? height : width) || 0;
  let along = isUpright ? y : x;
  for (const area of row) {
    const length = area / depth || 0;
    parts.push(isUpright ? { x, y: along, width: depth, height: length } : { x: along, y, width: length, height: depth });
    along += length;
  }
  return isUpright ? { x: x + depth, y, width: width - depth, height } : { x, y: y + depth, width, height: height - depth };
}
