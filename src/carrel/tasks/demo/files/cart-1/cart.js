// A shopping cart; prices are in euros.

export class Cart {
  #lines = [];

  add(name, price, quantity = 1) {
    this.#lines.push({ name, price, quantity });
    return this;
  }

  get lines() {
    return this.#lines.map((line) => ({ ...line }));
  }

  total() {
    let sum = 0;
    for (const line of this.#lines) {
      sum += line.price * line.quantity;
    }
    return sum;
  }

  discounted(percent) {
    return this.total() - (this.total() * percent) / 100;
  }
}
