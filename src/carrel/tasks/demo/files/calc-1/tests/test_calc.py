import unittest

from calc import value


class Calc(unittest.TestCase):
    def test_products_come_before_totals(self):
        self.assertEqual(value("2 + 3 * 4"), 14)

    def test_brackets(self):
        self.assertEqual(value("(2 + 3) * 4"), 20)

    def test_a_number_may_be_negative(self):
        self.assertEqual(value("-3 + 5"), 2)

    def test_what_is_no_sum_is_refused(self):
        for text in ("", "2 +", "(2", "2 2", "two"):
            with self.assertRaises(ValueError):
                value(text)
