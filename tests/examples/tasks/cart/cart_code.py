"""A shopping cart."""


class Cart:
    def __init__(self, prices, items={}):  # noqa: B006  the bug: all carts share one dict
        self.prices = prices
        self.items = items

    def add(self, name, count=1):
        self.items[name] = self.items.get(name, 0) + count

    def total(self):
        return sum(self.prices[name] * count for name, count in self.items.items())
