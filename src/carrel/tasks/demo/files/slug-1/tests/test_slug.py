import unittest

from slug import slug


class Slug(unittest.TestCase):
    def test_words_are_joined(self):
        self.assertEqual(slug("Hello, World"), "hello-world")

    def test_numbers_stay(self):
        self.assertEqual(slug("Top 10 of 2024"), "top-10-of-2024")

    def test_nothing_is_nothing(self):
        self.assertEqual(slug(" ... "), "")
