// Texts to begin with, by the kind of a task. Those of synthetic tasks are sequences of their generators with the answers.

/** A sequence of selective copy at the size of a task: data symbols among blanks, the marker, and the copy. */
function copied({ tokens, blanks, vocabulary }) {
  const room = (tokens + blanks) / tokens;
  const data = Array.from({ length: tokens }, (_, k) => String((3 * k * k + 5 * k + 1) % (vocabulary - 2)));
  const sequence = Array(tokens + blanks).fill("_");
  data.forEach((symbol, k) => (sequence[Math.floor(k * room) + ((7 * k + 3) % Math.floor(room))] = symbol));
  return [...sequence, ">", ...data].join(" ");
}

/** By the kind of a task: a text, or a function that makes one for a task. */
export const EXAMPLES = {
  flip_flop: "w 0 i 1 i 1 r 0 i 1 w 1 i 0 i 0 i 1 i 0 r 1 i 0 i 0 w 0 i 1 i 1 r 0",
  counting: "a = 0 ; pass; a ++; pass; pass; a ++; pass; a ++; pass; print a 3",
  selective_copy: copied,
  wikitext:
    "The position of a token can be counted in words or in sentences. A model that attends to the last sentence has to know where it begins. The last sentence is this one.",
  code: "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total / len(values)\n",
};
