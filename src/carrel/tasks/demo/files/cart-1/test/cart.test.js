import assert from "node:assert/strict";
import { test } from "node:test";

import { Cart } from "../cart.js";

test("an empty cart costs nothing", () => {
  assert.equal(new Cart().total(), 0);
});

test("quantities are counted", () => {
  assert.equal(new Cart().add("pen", 2, 3).add("book", 10).total(), 16);
});

test("a discount of nothing changes nothing", () => {
  assert.equal(new Cart().add("pen", 2).discounted(0), 2);
});
