"""Small programming problems with a right solution each, and where their tests' inputs come from.

The docstring of a function is its question, its body the right solution. `build.py` makes wrong
solutions of them and runs the tests.
"""

from __future__ import annotations

import inspect
import random
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Draw = Callable[[random.Random], Any]


@dataclass(frozen=True)
class Problem:
    """A question, its right solution, and how its tests' inputs are drawn."""

    name: str
    level: int
    question: str
    solution: str
    draws: tuple[Draw, ...]
    edges: tuple[tuple[Any, ...], ...]


PROBLEMS: list[Problem] = []


def problem(level: int, *draws: Draw, edges: tuple[tuple[Any, ...], ...] = ()) -> Any:
    """Register a function as a problem of a level from 1, the easiest, to 3."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        source = textwrap.dedent(inspect.getsource(function))
        signature = source[source.index("def ") : source.index('"""')].rstrip()
        body = source[source.rindex('"""') + 4 :].rstrip()
        question = inspect.cleandoc(function.__doc__ or "")
        solution = f"{signature}\n{body}\n"
        PROBLEMS.append(Problem(function.__name__, level, question, solution, draws, edges))
        return function

    return register


def whole(low: int = -20, high: int = 20) -> Draw:
    return lambda rng: rng.randint(low, high)


def wholes(low: int = -9, high: int = 9, least: int = 0, most: int = 8) -> Draw:
    return lambda rng: [rng.randint(low, high) for _ in range(rng.randint(least, most))]


def ascending(low: int = -9, high: int = 15, least: int = 0, most: int = 8) -> Draw:
    return lambda rng: sorted(wholes(low, high, least, most)(rng))


def text(letters: str = "abcab ", least: int = 0, most: int = 10) -> Draw:
    return lambda rng: "".join(rng.choice(letters) for _ in range(rng.randint(least, most)))


def words(least: int = 0, most: int = 6) -> Draw:
    some = ["pear", "fig", "apple", "kiwi", "plum", "fig", "Lemon", "date", "nut", "melon"]
    return lambda rng: [rng.choice(some) for _ in range(rng.randint(least, most))]


def sentence(least: int = 0, most: int = 6) -> Draw:
    return lambda rng: " ".join(words(least, most)(rng))


def grid(low: int = 0, high: int = 5, square: bool = False) -> Draw:
    def draw(rng: random.Random) -> list[list[int]]:
        rows = rng.randint(1, 4)
        columns = rows if square else rng.randint(1, 4)
        return [[rng.randint(low, high) for _ in range(columns)] for _ in range(rows)]

    return draw


def spans(most: int = 5) -> Draw:
    def draw(rng: random.Random) -> list[list[int]]:
        starts = [rng.randint(0, 15) for _ in range(rng.randint(0, most))]
        return [[start, start + rng.randint(0, 6)] for start in starts]

    return draw


# ---------------------------------------------------------------------------------- numbers


@problem(1, whole(), whole(), edges=((3, 3),))
def larger(a, b):
    """Return the larger of two whole numbers."""
    if a > b:
        return a
    return b


@problem(1, whole(), whole(), whole())
def middle_of_three(a, b, c):
    """Return the middle one of three whole numbers when they are put in order."""
    return a + b + c - min(a, b, c) - max(a, b, c)


@problem(1, whole(0, 30), edges=((0,), (1,)))
def factorial_last_digit(n):
    """Return the last decimal digit of n! for n >= 0."""
    product = 1
    for k in range(2, n + 1):
        product = product * k % 10
    return product


@problem(1, whole(-50, 50))
def sign(n):
    """Return 1 for a positive number, -1 for a negative one, and 0 for zero."""
    if n > 0:
        return 1
    if n < 0:
        return -1
    return 0


@problem(1, whole(0, 99999), edges=((0,), (10,)))
def digit_sum(n):
    """Return the sum of the decimal digits of n >= 0."""
    total = 0
    while n > 0:
        total += n % 10
        n //= 10
    return total


@problem(2, whole(0, 99999), edges=((0,), (38,)))
def digital_root(n):
    """Add up the decimal digits of n >= 0 again and again until one digit is left; return it."""
    while n >= 10:
        n = sum(int(digit) for digit in str(n))
    return n


@problem(1, whole(1890, 2110), edges=((2000,), (1900,), (2024,), (2023,), (400,)))
def is_leap_year(year):
    """Return whether a year is a leap year of the Gregorian calendar."""
    if year % 400 == 0:
        return True
    return year % 4 == 0 and year % 100 != 0


@problem(2, whole(-5, 120), edges=((1,), (2,), (4,), (25,), (49,)))
def is_prime(n):
    """Return whether n is a prime number. Numbers below 2 are not prime."""
    if n < 2:
        return False
    divisor = 2
    while divisor * divisor <= n:
        if n % divisor == 0:
            return False
        divisor += 1
    return True


@problem(2, whole(1, 60), whole(1, 60))
def greatest_common_divisor(a, b):
    """Return the greatest common divisor of two positive whole numbers."""
    while b != 0:
        a, b = b, a % b
    return a


@problem(2, whole(1, 30), whole(1, 30))
def least_common_multiple(a, b):
    """Return the least common multiple of two positive whole numbers."""
    multiple = max(a, b)
    while multiple % a != 0 or multiple % b != 0:
        multiple += 1
    return multiple


@problem(2, whole(1, 200), edges=((1,), (97,)))
def prime_factors(n):
    """Return the prime factors of n >= 1 in ascending order, each as often as it divides n."""
    factors = []
    divisor = 2
    while n > 1:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    return factors


@problem(1, whole(1, 60))
def divisors(n):
    """Return all positive divisors of n >= 1 in ascending order."""
    return [k for k in range(1, n + 1) if n % k == 0]


@problem(2, whole(1, 150), edges=((6,), (28,), (1,), (496,), (12,)))
def is_perfect(n):
    """Return whether n >= 1 equals the sum of its positive divisors other than itself."""
    total = 0
    for k in range(1, n):
        if n % k == 0:
            total += k
    return total == n


@problem(1, whole(0, 20), edges=((0,), (1,), (2,)))
def fibonacci(n):
    """Return the n-th Fibonacci number, where number 0 is 0 and number 1 is 1."""
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


@problem(2, whole(1, 40))
def collatz_steps(n):
    """Count the steps until n >= 1 becomes 1, when an even number is halved and an odd number n
    becomes 3 n + 1 at each step."""
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps


@problem(2, whole(0, 200), whole(2, 9), edges=((0, 2), (8, 2)))
def to_base(n, base):
    """Write n >= 0 as text in a base from 2 to 9, without leading zeros; 0 is "0"."""
    if n == 0:
        return "0"
    digits = ""
    while n > 0:
        digits = str(n % base) + digits
        n //= base
    return digits


@problem(2, whole(1, 400), edges=((4,), (9,), (40,), (90,), (399,)))
def to_roman(n):
    """Write a number from 1 to 400 in Roman numerals."""
    signs = [(400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL")]
    signs += [(10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]
    written = ""
    for value, numeral in signs:
        while n >= value:
            written += numeral
            n -= value
    return written


@problem(2, text("IVX", 1, 1), text("IVXI", 0, 3), edges=(("I", "V"), ("X", "IX"), ("X", "XIV")))
def from_roman(first, rest):
    """Read two texts of Roman numerals I, V and X, put together, as one number. A numeral that
    stands before a larger one is subtracted, every other one is added."""
    values = {"I": 1, "V": 5, "X": 10}
    numerals = first + rest
    total = 0
    for place, numeral in enumerate(numerals):
        value = values[numeral]
        if place + 1 < len(numerals) and value < values[numerals[place + 1]]:
            total -= value
        else:
            total += value
    return total


@problem(1, whole(-30, 30), whole(-10, 0), whole(0, 10))
def clamp(n, low, high):
    """Return n, or low where n is below low, or high where n is above high."""
    if n < low:
        return low
    if n > high:
        return high
    return n


@problem(2, whole(0, 1000), edges=((0,), (1,), (15,), (16,), (17,)))
def whole_square_root(n):
    """Return the largest whole number whose square is not above n >= 0."""
    root = 0
    while (root + 1) * (root + 1) <= n:
        root += 1
    return root


@problem(2, whole(0, 40), whole(0, 12), whole(1, 13))
def power_modulo(base, exponent, modulus):
    """Return base to the power of exponent, modulo modulus, for exponent >= 0 and modulus >= 1."""
    result = 1 % modulus
    for _ in range(exponent):
        result = result * base % modulus
    return result


@problem(1, whole(0, 255), edges=((0,), (255,)))
def count_ones(n):
    """Count the ones in the binary form of n >= 0."""
    count = 0
    while n:
        count += n & 1
        n >>= 1
    return count


@problem(1, whole(0, 100000), edges=((0,), (3600,), (59,)))
def as_clock(seconds):
    """Return a number of seconds as a list of hours, minutes and seconds, minutes and seconds
    below 60."""
    return [seconds // 3600, seconds % 3600 // 60, seconds % 60]


@problem(2, whole(0, 60))
def change_coins(amount):
    """Return the least number of coins of 1, 5, 10 and 20 that make up an amount."""
    coins = 0
    for value in (20, 10, 5, 1):
        coins += amount // value
        amount %= value
    return coins


@problem(3, wholes(1, 6, 1, 3), whole(0, 15), edges=(([3, 4], 6), ([2], 3)))
def fewest_coins(values, amount):
    """Return the least number of coins, each of one of the given values and any number of each,
    that make up an amount exactly; -1 where that is impossible."""
    best = [0] + [amount + 1] * amount
    for total in range(1, amount + 1):
        for value in values:
            if value <= total:
                best[total] = min(best[total], best[total - value] + 1)
    return best[amount] if best[amount] <= amount else -1


@problem(3, wholes(1, 6, 0, 4), whole(0, 12))
def ways_to_pay(values, amount):
    """Count the ways to make up an amount with coins of the given values; equal values in the list
    count as one, and the order of coins makes no difference."""
    ways = [1] + [0] * amount
    for value in sorted(set(values)):
        for total in range(value, amount + 1):
            ways[total] += ways[total - value]
    return ways[amount]


@problem(2, whole(0, 10), whole(0, 10))
def paths_in_grid(right, down):
    """Count the ways from the top left corner to a place so many steps to the right and so many
    down, when every step goes right or down."""
    ways = [1] * (right + 1)
    for _ in range(down):
        for column in range(1, right + 1):
            ways[column] += ways[column - 1]
    return ways[right]


@problem(2, whole(1, 9))
def pascal_row(n):
    """Return row n of Pascal's triangle, where row 1 is [1]."""
    row = [1]
    for _ in range(n - 1):
        row = [1] + [a + b for a, b in zip(row, row[1:])] + [1]
    return row


@problem(1, whole(0, 999), whole(0, 999))
def hamming_of_numbers(a, b):
    """Count the places in which the binary forms of two numbers >= 0 differ."""
    return bin(a ^ b).count("1")


@problem(2, whole(1, 300), edges=((10,), (12321,), (1221,), (12331,)))
def is_palindrome_number(n):
    """Return whether the decimal digits of n > 0 read the same backwards, without making a text."""
    rest, backwards = n, 0
    while rest > 0:
        backwards = backwards * 10 + rest % 10
        rest //= 10
    return backwards == n


# ------------------------------------------------------------------------------------ lists


@problem(1, wholes(), edges=(([],), ([5],)))
def sum_of_even(numbers):
    """Return the sum of the even numbers of a list."""
    total = 0
    for number in numbers:
        if number % 2 == 0:
            total += number
    return total


@problem(1, wholes(least=1))
def largest_difference(numbers):
    """Return the difference between the largest and the smallest number of a list that is not
    empty."""
    return max(numbers) - min(numbers)


@problem(1, wholes(), edges=(([],), ([0],), ([-1],)))
def count_positive(numbers):
    """Count the numbers above zero in a list."""
    return sum(1 for number in numbers if number > 0)


@problem(1, wholes(0, 5), whole(0, 5))
def first_place(numbers, wanted):
    """Return the first place, from 0, at which a number stands in a list; -1 where it does not."""
    for place, number in enumerate(numbers):
        if number == wanted:
            return place
    return -1


@problem(1, wholes(0, 5), whole(0, 5))
def last_place(numbers, wanted):
    """Return the last place, from 0, at which a number stands in a list; -1 where it does not."""
    found = -1
    for place, number in enumerate(numbers):
        if number == wanted:
            found = place
    return found


@problem(1, wholes(0, 4))
def without_repeats(numbers):
    """Return the numbers of a list without repeats, each where it came first."""
    seen = []
    for number in numbers:
        if number not in seen:
            seen.append(number)
    return seen


@problem(1, wholes(0, 2))
def without_neighbours_alike(numbers):
    """Return a list in which each run of equal neighbours is one number."""
    kept = []
    for number in numbers:
        if not kept or kept[-1] != number:
            kept.append(number)
    return kept


@problem(1, wholes())
def running_sums(numbers):
    """Return a list whose places hold the sum of all numbers up to there."""
    total, sums = 0, []
    for number in numbers:
        total += number
        sums.append(total)
    return sums


@problem(1, wholes(), whole(0, 9))
def rotate_left(numbers, steps):
    """Move every number of a list to the left by so many places; what falls off comes back at the
    right end."""
    if not numbers:
        return []
    steps %= len(numbers)
    return numbers[steps:] + numbers[:steps]


@problem(1, wholes(), whole(1, 4))
def in_chunks(numbers, size):
    """Cut a list into lists of a size; the last may be shorter."""
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


@problem(1, wholes(), wholes())
def take_turns(first, second):
    """Return the numbers of two lists in turn, the first list's first; what is left of the longer
    list follows."""
    mixed = []
    for place in range(max(len(first), len(second))):
        if place < len(first):
            mixed.append(first[place])
        if place < len(second):
            mixed.append(second[place])
    return mixed


@problem(2, ascending(), ascending())
def merge_sorted(first, second):
    """Merge two ascending lists into one ascending list."""
    merged, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        if first[i] <= second[j]:
            merged.append(first[i])
            i += 1
        else:
            merged.append(second[j])
            j += 1
    return merged + first[i:] + second[j:]


@problem(2, ascending(0, 12), whole(0, 12))
def binary_search(numbers, wanted):
    """Return the place at which a number would be put into an ascending list to keep it ascending,
    before those that equal it."""
    low, high = 0, len(numbers)
    while low < high:
        middle = (low + high) // 2
        if numbers[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@problem(2, wholes())
def insertion_sort(numbers):
    """Return the numbers of a list in ascending order."""
    ordered = []
    for number in numbers:
        place = len(ordered)
        while place > 0 and ordered[place - 1] > number:
            place -= 1
        ordered.insert(place, number)
    return ordered


@problem(2, wholes(0, 9, 0, 7), whole(0, 12))
def has_pair_with_sum(numbers, total):
    """Return whether two numbers at different places of a list add up to a total."""
    for i in range(len(numbers)):
        for j in range(i + 1, len(numbers)):
            if numbers[i] + numbers[j] == total:
                return True
    return False


@problem(2, wholes(-6, 6, 1, 8), edges=(([-3, -1, -2],), ([2, -1, 2],)))
def best_stretch(numbers):
    """Return the largest sum of neighbouring numbers, one at least, in a list that is not empty."""
    best = ending_here = numbers[0]
    for number in numbers[1:]:
        ending_here = max(number, ending_here + number)
        best = max(best, ending_here)
    return best


@problem(2, wholes(0, 20, 0, 8), edges=(([],), ([3],), ([5, 4],)))
def best_trade(prices):
    """Return the largest gain of buying at one price of a list and selling at a later one; 0 where
    no trade gains."""
    gain, lowest = 0, None
    for price in prices:
        if lowest is None or price < lowest:
            lowest = price
        gain = max(gain, price - lowest)
    return gain


@problem(2, wholes(0, 9))
def longest_rising(numbers):
    """Return the length of the longest run of neighbours in which each is above the one before."""
    longest = length = 0
    for place, number in enumerate(numbers):
        if place > 0 and number > numbers[place - 1]:
            length += 1
        else:
            length = 1
        longest = max(longest, length)
    return longest


@problem(3, wholes(0, 9))
def longest_rising_choice(numbers):
    """Return how many numbers, at most, can be chosen from a list, in its order, so that each is
    above the one before."""
    best = []
    for place, number in enumerate(numbers):
        lengths = [best[k] for k in range(place) if numbers[k] < number]
        best.append(1 + max(lengths, default=0))
    return max(best, default=0)


@problem(1, wholes(0, 3, 1, 7))
def most_common(numbers):
    """Return the number that occurs most often in a list that is not empty; of several, the
    smallest."""
    return min(numbers, key=lambda number: (-numbers.count(number), number))


@problem(2, wholes(0, 2))
def majority(numbers):
    """Return the number that fills more than half of a list, or None."""
    for number in set(numbers):
        if 2 * numbers.count(number) > len(numbers):
            return number
    return None


@problem(1, wholes(least=1))
def median_twice(numbers):
    """Return twice the median of a list that is not empty, as a whole number."""
    ordered = sorted(numbers)
    half = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return 2 * ordered[half]
    return ordered[half - 1] + ordered[half]


@problem(1, wholes(0, 9), whole(0, 4))
def largest_few(numbers, count):
    """Return so many of the largest numbers of a list in descending order; all of them, where there
    are fewer."""
    return sorted(numbers, reverse=True)[:count]


@problem(2, wholes(0, 6))
def second_largest(numbers):
    """Return the second largest of the different numbers in a list; None where there is no second
    one."""
    different = sorted(set(numbers))
    if len(different) < 2:
        return None
    return different[-2]


@problem(2, wholes(0, 3))
def move_zeros(numbers):
    """Move the zeros of a list to its end; the order of the others stays."""
    others = [number for number in numbers if number != 0]
    return others + [0] * (len(numbers) - len(others))


@problem(2, wholes(-4, 4))
def products_of_others(numbers):
    """Return a list with the product of all other numbers at each place; an empty product is 1."""
    products = []
    for place in range(len(numbers)):
        product = 1
        for other, number in enumerate(numbers):
            if other != place:
                product *= number
        products.append(product)
    return products


@problem(2, wholes(0, 8))
def missing_smallest(numbers):
    """Return the smallest whole number from 0 on that is not in a list."""
    missing = 0
    while missing in numbers:
        missing += 1
    return missing


@problem(2, wholes(0, 4, 0, 7), wholes(0, 4, 0, 7))
def common_with_counts(first, second):
    """Return the numbers that two lists have in common in ascending order, each as often as it
    occurs in both."""
    common = []
    for number in sorted(set(first)):
        common += [number] * min(first.count(number), second.count(number))
    return common


@problem(2, spans(), edges=(([],), ([[1, 3], [3, 5]],), ([[1, 9], [2, 3]],)))
def merge_spans(spans):
    """Merge spans [start, end] that overlap or touch, and return them in ascending order."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


@problem(3, spans())
def most_at_once(spans):
    """Return how many spans [start, end) at most are open at the same time. The end does not belong
    to a span, and an empty span is never open."""
    most = 0
    for moment in range(30):
        most = max(most, sum(start <= moment < end for start, end in spans))
    return most


@problem(3, spans())
def most_apart(spans):
    """Return how many spans [start, end] at most can be chosen so that each begins after the one
    before has ended; they may not even touch."""
    chosen, last = 0, None
    for start, end in sorted(spans, key=lambda span: span[1]):
        if last is None or start > last:
            chosen += 1
            last = end
    return chosen


@problem(3, wholes(0, 5, 0, 7), edges=(([3, 0, 2],), ([2, 0, 2],), ([4, 1, 3, 0, 3],)))
def trapped_water(heights):
    """Walls of width 1 and the given heights stand side by side. Return how much water stays
    between them after rain."""
    water = 0
    for place, height in enumerate(heights):
        level = min(max(heights[: place + 1]), max(heights[place:]))
        water += level - height
    return water


@problem(3, wholes(1, 6, 0, 6), whole(0, 14))
def can_sum_to(numbers, total):
    """Return whether some of the numbers of a list, each used once at most, add up to a total. No
    numbers at all add up to 0."""
    reachable = {0}
    for number in numbers:
        reachable |= {reached + number for reached in reachable}
    return total in reachable


@problem(3, wholes(0, 9, 0, 7))
def best_without_neighbours(numbers):
    """Return the largest sum of numbers of a list of which no two are neighbours; choosing none is
    allowed."""
    taken, left = 0, 0
    for number in numbers:
        taken, left = left + number, max(taken, left)
    return max(taken, left)


@problem(3, wholes(0, 4, 1, 7), edges=(([0],), ([1, 0, 1],), ([3, 2, 1, 0, 4],)))
def can_jump_to_end(jumps):
    """From place i of a list one may jump ahead by at most jumps[i] places. Return whether the last
    place can be reached from the first."""
    reach = 0
    for place, jump in enumerate(jumps):
        if place > reach:
            return False
        reach = max(reach, place + jump)
    return True


@problem(3, wholes(-3, 3, 0, 7), whole(-3, 6))
def stretches_with_sum(numbers, total):
    """Count the stretches of neighbouring numbers, one at least, that add up to a total."""
    count = 0
    for start in range(len(numbers)):
        reached = 0
        for number in numbers[start:]:
            reached += number
            if reached == total:
                count += 1
    return count


@problem(2, wholes(0, 9))
def peaks(numbers):
    """Return the places of the numbers that are above all of their neighbours; the first and the
    last number have one neighbour, a lone number none."""
    found = []
    for place, number in enumerate(numbers):
        left = place == 0 or numbers[place - 1] < number
        right = place == len(numbers) - 1 or numbers[place + 1] < number
        if left and right:
            found.append(place)
    return found


@problem(2, wholes(0, 9))
def inversions(numbers):
    """Count the pairs of places in a list at which a larger number stands before a smaller one."""
    count = 0
    for i in range(len(numbers)):
        for j in range(i + 1, len(numbers)):
            if numbers[i] > numbers[j]:
                count += 1
    return count


@problem(2, wholes(0, 9, 2, 8), whole(1, 3))
def smoothed(numbers, width):
    """Return the sums of every so many neighbouring numbers of a list, from left to right."""
    return [sum(numbers[at : at + width]) for at in range(len(numbers) - width + 1)]


# ------------------------------------------------------------------------------------ texts


@problem(1, text("abcdeAEIou ", 0, 10))
def count_vowels(text):
    """Count the vowels a, e, i, o and u in a text, upper or lower case."""
    return sum(1 for letter in text.lower() if letter in "aeiou")


@problem(1, sentence())
def reverse_words(text):
    """Return the words of a text in reverse order, with one space between two."""
    return " ".join(reversed(text.split()))


@problem(1, text("aab", 0, 6), edges=(("",), ("abcba",), ("abca",)))
def is_palindrome(text):
    """Return whether a text reads the same backwards."""
    for place in range(len(text) // 2):
        if text[place] != text[len(text) - 1 - place]:
            return False
    return True


@problem(2, text("aAbB ,.", 0, 8), edges=(("A, b a!",), ("",)))
def is_loose_palindrome(text):
    """Return whether the letters of a text read the same backwards, whatever their case and
    whatever stands between them."""
    letters = [letter.lower() for letter in text if letter.isalpha()]
    return letters == letters[::-1]


@problem(1, text("aabbc", 0, 9), edges=(("",),))
def run_lengths(text):
    """Write each run of equal letters as the letter and its number: "aab" becomes "a2b1"."""
    written, place = "", 0
    while place < len(text):
        end = place
        while end < len(text) and text[end] == text[place]:
            end += 1
        written += text[place] + str(end - place)
        place = end
    return written


@problem(2, text("abc", 1, 1), whole(1, 12), text("abc", 1, 1), whole(1, 12))
def from_run_lengths(first, n, second, m):
    """The runs "a12" and "b3" stand for twelve a and three b. Put two runs, of a letter and a
    number each, into one text with the shorter run first; of equally long ones the first."""
    if n <= m:
        return first * n + second * m
    return second * m + first * n


@problem(1, text("xyzabc", 0, 8), whole(0, 30))
def caesar(text, shift):
    """Move each of the small letters a to z of a text forwards in the alphabet by so many places;
    after z comes a."""
    return "".join(chr((ord(letter) - ord("a") + shift) % 26 + ord("a")) for letter in text)


@problem(1, words(), edges=(([],),))
def longest_word(words):
    """Return the longest word of a list, of several the first, and an empty text without any."""
    longest = ""
    for word in words:
        if len(word) > len(longest):
            longest = word
    return longest


@problem(1, words())
def initials(words):
    """Return the first letters of words as one text in upper case."""
    return "".join(word[0].upper() for word in words)


@problem(1, sentence())
def capitalised(text):
    """Return a text in which every word begins with a capital letter and goes on in small ones;
    words are separated by single spaces."""
    return " ".join(word[:1].upper() + word[1:].lower() for word in text.split(" "))


@problem(1, text("ab", 0, 4), text("ab", 0, 4), edges=(("listen", "silent"), ("aab", "abb")))
def is_anagram(first, second):
    """Return whether two texts have the same letters, each equally often."""
    return sorted(first) == sorted(second)


@problem(2, text("abcab", 0, 8))
def first_single(text):
    """Return the first letter that occurs once in a text, or an empty text."""
    for letter in text:
        if text.count(letter) == 1:
            return letter
    return ""


@problem(2, text("()", 0, 8), edges=(("",), ("())(",), ("(())()",), (")(",)))
def is_balanced(text):
    """Return whether every opening round bracket of a text of brackets is closed by a later one,
    and every closing one closes one."""
    depth = 0
    for bracket in text:
        if bracket == "(":
            depth += 1
        else:
            depth -= 1
        if depth < 0:
            return False
    return depth == 0


@problem(3, text("()[]", 0, 8), edges=(("([])",), ("([)]",), ("[]()",), ("((",), ("",)))
def is_balanced_mixed(text):
    """Return whether the round and square brackets of a text close each other in the right
    order."""
    pairs = {")": "(", "]": "["}
    open_ones = []
    for bracket in text:
        if bracket in "([":
            open_ones.append(bracket)
        elif not open_ones or open_ones.pop() != pairs[bracket]:
            return False
    return not open_ones


@problem(2, text("()", 0, 9))
def deepest(text):
    """Return how deep the brackets of a text are nested at most; a closing bracket that closes none
    is passed over."""
    depth = most = 0
    for bracket in text:
        if bracket == "(":
            depth += 1
            most = max(most, depth)
        elif depth > 0:
            depth -= 1
    return most


@problem(2, text("abcd", 0, 8), edges=(("abba",), ("abcabc",)))
def longest_without_repeat(text):
    """Return the length of the longest stretch of a text in which no letter occurs twice."""
    longest = start = 0
    for end in range(len(text)):
        while text[end] in text[start:end]:
            start += 1
        longest = max(longest, end - start + 1)
    return longest


@problem(2, words(1, 4), edges=((["flow", "flower", "flight"],), (["a"],), (["", "b"],)))
def common_beginning(words):
    """Return the longest text with which all words of a list, which is not empty, begin."""
    beginning = words[0]
    for word in words[1:]:
        while not word.startswith(beginning):
            beginning = beginning[:-1]
    return beginning


@problem(3, text("abc", 0, 6), text("abc", 0, 6))
def edit_distance(first, second):
    """Return the least number of letters to insert, delete or replace to turn one text into
    another."""
    row = list(range(len(second) + 1))
    for i, letter in enumerate(first, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(second, 1):
            cost = 0 if letter == other else 1
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + cost)
    return row[-1]


@problem(3, text("abc", 0, 7), text("abc", 0, 7))
def longest_common_choice(first, second):
    """Return how many letters, at most, can be chosen from both of two texts in order so that the
    same text results."""
    best = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i in range(len(first)):
        for j in range(len(second)):
            if first[i] == second[j]:
                best[i + 1][j + 1] = best[i][j] + 1
            else:
                best[i + 1][j + 1] = max(best[i][j + 1], best[i + 1][j])
    return best[-1][-1]


@problem(2, text("abc", 0, 3), text("abcabc", 0, 9), edges=(("", "abc"), ("ac", "ab")))
def is_hidden_in(part, whole):
    """Return whether the letters of one text occur in another in the same order, other letters
    between them or not."""
    place = 0
    for letter in whole:
        if place < len(part) and part[place] == letter:
            place += 1
    return place == len(part)


@problem(2, text("ab", 1, 2), text("abab", 0, 9))
def count_overlapping(part, whole):
    """Count the places at which a text, which is not empty, stands in another; they may overlap."""
    count = 0
    for start in range(len(whole) - len(part) + 1):
        if whole[start : start + len(part)] == part:
            count += 1
    return count


@problem(2, words())
def count_words(words):
    """Return a list of [word, count] in alphabetical order, upper and lower case alike, the words
    in lower case."""
    lowered = [word.lower() for word in words]
    return [[word, lowered.count(word)] for word in sorted(set(lowered))]


@problem(2, words(), whole(4, 14))
def wrap_lines(words, width):
    """Put words into lines of at most a width, one space between two words, as many as fit into
    each; a word that is longer than a line stands alone."""
    lines = []
    for word in words:
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines


@problem(2, whole(0, 99), whole(0, 99), text("+-*", 1, 1))
def calculate(a, b, operation):
    """Return what an operation "+", "-" or "*" makes of two numbers, and 0 for any other sign."""
    if operation == "+":
        return a + b
    if operation == "-":
        return a - b
    if operation == "*":
        return a * b
    return 0


@problem(2, text("0123456789", 1, 7), edges=(("79927398713",), ("0",), ("18",)))
def luhn(digits):
    """Return whether digits pass the Luhn check: from the right, every second digit is doubled,
    less 9 where that is above 9, and the sum of all must be a multiple of 10."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit)
        if place % 2 == 1:
            value *= 2
            if value > 9:
                value -= 9
        total += value
    return total % 10 == 0


@problem(2, text("01", 0, 8), edges=(("",), ("111",)))
def binary_to_number(digits):
    """Read a text of zeros and ones as a binary number; an empty text is 0."""
    number = 0
    for digit in digits:
        number = 2 * number + int(digit)
    return number


@problem(1, text("abcXYZ12 ", 0, 9))
def swap_case(text):
    """Return a text with small letters for capital ones and the other way round."""
    swapped = ""
    for letter in text:
        swapped += letter.lower() if letter.isupper() else letter.upper()
    return swapped


@problem(2, text("aeiobc", 1, 7), edges=(("apple",), ("string",), ("xyz",)))
def pig_latin(word):
    """Move the consonants before the first vowel (a, e, i, o, u) of a word to its end and add "ay".
    A word without a vowel only gets "ay"."""
    for place, letter in enumerate(word):
        if letter in "aeiou":
            return word[place:] + word[:place] + "ay"
    return word + "ay"


# ------------------------------------------------------------------------------ grids and more


@problem(1, grid())
def transpose(rows):
    """Swap the rows and columns of a grid."""
    return [list(column) for column in zip(*rows)]


@problem(1, grid(square=True))
def diagonal_sum(rows):
    """Return the sum of the numbers on the diagonal of a square grid from the top left."""
    return sum(rows[place][place] for place in range(len(rows)))


@problem(2, grid(square=True))
def both_diagonals(rows):
    """Return the sum of the numbers on both diagonals of a square grid; the middle counts once."""
    size, total = len(rows), 0
    for place in range(size):
        total += rows[place][place]
        if place != size - 1 - place:
            total += rows[place][size - 1 - place]
    return total


@problem(2, grid())
def rotate_grid(rows):
    """Turn a grid clockwise by a quarter."""
    return [list(column) for column in zip(*rows[::-1])]


@problem(2, grid(0, 1))
def live_neighbours(rows):
    """Return a grid with the number of ones among the up to eight neighbours of each place."""
    height, width = len(rows), len(rows[0])
    counts = [[0] * width for _ in range(height)]
    for y in range(height):
        for x in range(width):
            for other_y in range(max(0, y - 1), min(height, y + 2)):
                for other_x in range(max(0, x - 1), min(width, x + 2)):
                    if (other_y, other_x) != (y, x):
                        counts[y][x] += rows[other_y][other_x]
    return counts


@problem(3, grid(0, 1))
def count_islands(rows):
    """Count the islands of a grid: groups of ones that hang together to the left, right, up or
    down."""
    height, width = len(rows), len(rows[0])
    seen = set()
    islands = 0
    for y in range(height):
        for x in range(width):
            if rows[y][x] == 1 and (y, x) not in seen:
                islands += 1
                todo = [(y, x)]
                while todo:
                    place = todo.pop()
                    if place in seen:
                        continue
                    seen.add(place)
                    for dy, dx in ((0, 1), (1, 0), (0, -1), (-1, 0)):
                        b, a = place[0] + dy, place[1] + dx
                        if 0 <= b < height and 0 <= a < width and rows[b][a] == 1:
                            todo.append((b, a))
    return islands


@problem(3, grid(0, 9))
def cheapest_path(rows):
    """Return the smallest sum of the numbers on a path from the top left to the bottom right of a
    grid that goes right or down at each step."""
    costs = []
    for y, row in enumerate(rows):
        for x, cost in enumerate(row):
            if y > 0 and x > 0:
                cost += min(costs[x], costs[x - 1])
            elif y > 0:
                cost += costs[x]
            elif x > 0:
                cost += costs[x - 1]
            if y == 0:
                costs.append(cost)
            else:
                costs[x] = cost
    return costs[-1]


@problem(2, grid())
def spiral(rows):
    """Return the numbers of a grid along a spiral, clockwise from the top left corner inwards."""
    order = []
    while rows:
        order += rows[0]
        rows = [list(column) for column in zip(*rows[1:])][::-1]
    return order


@problem(2, grid(0, 3))
def saddle_points(rows):
    """Count the places of a grid that are the smallest of their row and the largest of their
    column; ties count."""
    count = 0
    for row in rows:
        for x, number in enumerate(row):
            column = [other[x] for other in rows]
            if number == min(row) and number == max(column):
                count += 1
    return count


@problem(3, whole(2, 6), spans(6), edges=((3, [[0, 1], [1, 2]]), (2, [])))
def reachable(size, links):
    """Links [a, b] lead from place a modulo size to place b modulo size. Return the places that can
    be reached from place 0, itself included, in ascending order."""
    reached, todo = {0}, [0]
    while todo:
        place = todo.pop()
        for a, b in links:
            if a % size == place and b % size not in reached:
                reached.add(b % size)
                todo.append(b % size)
    return sorted(reached)


@problem(3, wholes(-1, 9, 0, 8), edges=(([3, -1, -1],), ([-1],), ([2, 3, -1, 4, -1],)))
def serve_queue(events):
    """Numbers >= 0 arrive in a queue; at -1 the one that waits longest is served, where there is
    one. Return a list of those served and a list of those that still wait."""
    waiting, served = [], []
    for event in events:
        if event >= 0:
            waiting.append(event)
        elif waiting:
            served.append(waiting.pop(0))
    return [served, waiting]


@problem(3, wholes(-3, 9, 0, 8), edges=(([2, 3, -1],), ([2, 3, 4, -2, -1],), ([-1],)))
def stack_machine(program):
    """Run a program for a stack: a number >= 0 is put on it, -1 replaces the two top numbers by
    their sum, -2 by their product, -3 doubles the top one. What lacks numbers does nothing. Return
    the stack."""
    stack = []
    for step in program:
        if step >= 0:
            stack.append(step)
        elif step == -3 and stack:
            stack.append(2 * stack.pop())
        elif step != -3 and len(stack) >= 2:
            a, b = stack.pop(), stack.pop()
            stack.append(a + b if step == -1 else a * b)
    return stack


@problem(3, whole(1, 3), wholes(0, 5, 0, 9), edges=((2, [1, 2, 3, 1]), (1, [])))
def cache_misses(size, requests):
    """A cache keeps so many of the numbers that were asked for last. Return how many requests were
    for numbers that it did not keep."""
    kept, misses = [], 0
    for request in requests:
        if request in kept:
            kept.remove(request)
        else:
            misses += 1
            if len(kept) == size:
                kept.pop(0)
        kept.append(request)
    return misses


@problem(2, whole(1, 8), whole(1, 4))
def last_in_circle(people, step):
    """People 0, 1, ... stand in a circle and every so-manieth leaves, counted on from the one who
    left last. Return who stays."""
    circle, place = list(range(people)), 0
    while len(circle) > 1:
        place = (place + step - 1) % len(circle)
        circle.pop(place)
    return circle[0]


@problem(2, whole(1, 28), whole(1, 12), edges=((31, 12), (1, 1), (1, 3)))
def day_of_year(day, month):
    """Return the number of a day in a year that is no leap year; 1 January is day 1."""
    lengths = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
    return sum(lengths[: month - 1]) + day


@problem(2, whole(0, 23), whole(0, 59), whole(-200, 200))
def add_minutes(hour, minute, more):
    """Return the time of day as [hour, minute] so many minutes after a time; minutes may be
    negative, and the day wraps round."""
    total = (hour * 60 + minute + more) % 1440
    return [total // 60, total % 60]


@problem(3, wholes(0, 3, 0, 6), wholes(0, 3, 0, 6))
def add_polynomials(first, second):
    """Add two polynomials, lists of coefficients from the constant on; zeros at the end of the sum
    are left out."""
    total = [0] * max(len(first), len(second))
    for place, value in enumerate(first):
        total[place] += value
    for place, value in enumerate(second):
        total[place] += value
    while total and total[-1] == 0:
        total.pop()
    return total


@problem(3, wholes(-2, 3, 1, 4), wholes(-2, 3, 1, 4))
def multiply_polynomials(first, second):
    """Multiply two polynomials, lists of coefficients from the constant on, which are not empty."""
    product = [0] * (len(first) + len(second) - 1)
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            product[i + j] += a * b
    return product


@problem(2, wholes(-3, 3, 0, 5), whole(-3, 3))
def evaluate_polynomial(coefficients, x):
    """Return the value of a polynomial at x; coefficients begin with that of the highest power."""
    value = 0
    for coefficient in coefficients:
        value = value * x + coefficient
    return value


@problem(2, whole(-2, 2), whole(-2, 2), whole(-2, 2), whole(-2, 2))
def knight_can_move(x, y, to_x, to_y):
    """Return whether a knight of chess can go from one place of an endless board to another in one
    move."""
    across, along = abs(x - to_x), abs(y - to_y)
    return sorted([across, along]) == [1, 2]


@problem(2, whole(1, 12), whole(1, 12), whole(1, 12))
def kind_of_triangle(a, b, c):
    """Return "none" where three lengths are no triangle (two sides must be longer than the third),
    or "equal", "isosceles" or "scalene" for three, two or no equal sides."""
    longest = max(a, b, c)
    if a + b + c <= 2 * longest:
        return "none"
    if a == b == c:
        return "equal"
    if a == b or b == c or a == c:
        return "isosceles"
    return "scalene"
