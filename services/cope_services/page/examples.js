// Texts to start with, by kind of task. For other tasks, the service generates them.

export const EXAMPLES = {
  flip_flop: "w 0 i 1 i 1 r 0 i 1 w 1 i 0 i 0 i 1 i 0 r 1 i 0 i 0 w 0 i 1 i 1 r 0",
  counting: "a = 0 ; pass; a ++; pass; pass; a ++; pass; a ++; pass; print a 3",
  text: "It was a bright day. The lobster walked along the shore, and the shore was long. It walked until it was dark.",
  wikitext:
    "The position of a token can be counted in words or in sentences. A model that attends to the last sentence has to know where it begins. The last sentence is this one.",
  code: "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total / len(values)\n",
};
