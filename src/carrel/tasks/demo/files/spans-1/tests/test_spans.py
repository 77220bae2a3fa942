import unittest

from booking.spans import free, merged


class Merged(unittest.TestCase):
    def test_spans_that_overlap_become_one(self):
        self.assertEqual(merged([(0, 30), (20, 60)]), [(0, 60)])

    def test_spans_apart_stay_apart(self):
        self.assertEqual(merged([(0, 30), (40, 60)]), [(0, 30), (40, 60)])


class Free(unittest.TestCase):
    def test_an_empty_day_is_free(self):
        self.assertEqual(free([], (0, 480)), [(0, 480)])

    def test_what_lies_between(self):
        self.assertEqual(free([(60, 120), (180, 240)], (0, 480)), [(0, 60), (120, 180), (240, 480)])
