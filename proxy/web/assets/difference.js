// What differs between two short texts, word by word.

// Returns two lists of [text, isChanged], one for each side.
export function difference(old, now) {
  const [a, b] = [words(old), words(now)];
  const lengths = commonLengths(a, b);
  const sides = [[], []];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      add(sides[0], a[i++], false);
      add(sides[1], b[j++], false);
    } else if (j >= b.length || (i < a.length && lengths[i + 1][j] >= lengths[i][j + 1])) {
      add(sides[0], a[i++], true);
    } else {
      add(sides[1], b[j++], true);
    }
  }
  return forgiveEnds(sides);
}

// Both texts are cut at some length: what only one of them still shows at its end need not be a change.
function forgiveEnds(sides) {
  const ends = sides.map((side) => side.at(-1));
  if (ends[0]?.[1] !== ends[1]?.[1]) ends.forEach((end) => end && (end[1] = false));
  return sides;
}

const words = (text) => text.match(/[\p{L}\p{N}_]+|\s+|[^\p{L}\p{N}_\s]/gu) ?? [];

// lengths[i][j] is how many words a from i on and b from j on have in common, in order.
function commonLengths(a, b) {
  const lengths = Array.from({ length: a.length + 1 }, () => new Array(b.length + 1).fill(0));
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      lengths[i][j] = a[i] === b[j] ? lengths[i + 1][j + 1] + 1 : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
    }
  }
  return lengths;
}

function add(side, text, isChanged) {
  const last = side.at(-1);
  if (last && last[1] === isChanged) last[0] += text;
  else side.push([text, isChanged]);
}
