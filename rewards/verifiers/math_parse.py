"""Mathematical expressions, in LaTeX or as people type them, to SymPy. All of the text is read, or none.

A small precedence parser that knows what it cannot read and refuses numbers too large to write down, so that
an answer like ``9^{9^{9^9}}`` costs nothing. What it refuses for its syntax (sums, integrals, limits) goes
to the LaTeX parser under math-verify.
"""

from __future__ import annotations

import functools
import re

import sympy
from sympy import Expr, Integer, Rational

SHORT_WORDS = frozenset(
    ["all", "and", "any", "are", "but", "for", "not", "off", "one", "six", "ten", "the", "two", "was", "yes"]
)
MAX_BITS = 200_000
MAX_FACTORIAL = 5_000
MAX_ROOT = 10_000
MAX_DEGREE = 5_000
MAX_CHARACTERS = 2_000
MAX_DEPTH = 60

TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<command>\\[a-zA-Z]+|\\[|{}])|(?P<name>[a-zA-Z]+)|(?P<sign>\*\*|.))"
)
GREEK = [
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta",
    "kappa", "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "phi", "varphi", "chi", "psi", "omega",
    "Gamma", "Delta", "Theta", "Lambda", "Sigma", "Phi", "Psi", "Omega", "ell", "hbar",
]  # fmt: skip
FUNCTIONS = {
    "sin": sympy.sin, "cos": sympy.cos, "tan": sympy.tan, "cot": sympy.cot, "sec": sympy.sec, "csc": sympy.csc,
    "arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan, "asin": sympy.asin, "acos": sympy.acos,
    "atan": sympy.atan, "sinh": sympy.sinh, "cosh": sympy.cosh, "tanh": sympy.tanh, "ln": sympy.log,
    "log": sympy.log, "exp": sympy.exp, "abs": sympy.Abs, "floor": sympy.floor, "ceil": sympy.ceiling,
    "max": sympy.Max, "min": sympy.Min, "gcd": sympy.gcd, "lcm": sympy.lcm, "lg": lambda x: sympy.log(x, 10),
}  # fmt: skip
CONSTANTS = {
    "pi": sympy.pi, "e": sympy.E, "i": sympy.I, "infty": sympy.oo, "infinity": sympy.oo, "inf": sympy.oo,
    "oo": sympy.oo, "imath": sympy.I,
}  # fmt: skip
TIMES = {"*", "\\cdot", "\\times", "\\ast"}
OVER = {"/", "\\div"}
CLOSING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}


class Unreadable(ValueError):
    """Not an expression that this parser knows."""


class TooLarge(Unreadable):
    """A number that nobody could write down."""


def power(base: Expr, exponent: Expr) -> Expr:
    """``base ** exponent``, unless its value, here or at the points where it is compared, would be enormous."""
    if exponent.is_Rational and exponent.q > MAX_ROOT:
        raise TooLarge("a root is too high")
    if exponent.free_symbols:
        if tower(exponent) > 1:
            raise TooLarge("powers of powers of powers")
    elif base.free_symbols:
        if not abs(sympy.N(exponent, 8)) <= MAX_DEGREE:
            raise TooLarge("a degree is too high")
    elif base not in (0, 1, -1) and not exponent.is_infinite:
        bits = abs(sympy.log(abs(sympy.N(base, 8)), 2)) * abs(sympy.N(exponent, 8))
        if base.is_Rational:  # numerator and denominator are both written down
            bits = max(int(base.p).bit_length(), int(base.q).bit_length()) * abs(sympy.N(exponent, 8))
        if not bits <= MAX_BITS:
            raise TooLarge("a power is too large")
    return sympy.Pow(base, exponent)


def tower(exponent: Expr) -> int:
    """How many growing functions of a variable stand above each other."""
    if not exponent.free_symbols:
        return 0
    grows = isinstance(exponent, sympy.factorial) or (exponent.is_Pow and exponent.exp.free_symbols)
    return int(bool(grows)) + max(map(tower, exponent.args), default=0)


def factorial(value: Expr) -> Expr:
    if (value.is_Rational and value > MAX_FACTORIAL) or tower(value) > 0:
        raise TooLarge("a factorial is too large")
    return sympy.factorial(value)


def binomial(n: Expr, k: Expr) -> Expr:
    if (n.is_Rational and n > MAX_FACTORIAL) or tower(n) > 0:
        raise TooLarge("a binomial is too large")
    return sympy.binomial(n, k)


class Parser:
    """One expression. ``complex_i``: the letter i is the imaginary unit."""

    def __init__(self, text: str, complex_i: bool) -> None:
        if len(text) > MAX_CHARACTERS:
            raise Unreadable("too long")
        self.tokens: list[tuple[str, str]] = []
        for match in TOKEN.finditer(text.strip()):
            kind = match.lastgroup or ""
            self.tokens.append((kind, match[kind]))
        self.at, self.depth, self.complex_i = 0, 0, complex_i

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def kind(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.at += 1
        return token

    def expect(self, token: str) -> None:
        if self.take() != token:
            raise Unreadable(f"'{token}' is missing")

    def whole(self) -> Expr:
        if not self.tokens:
            raise Unreadable("empty")
        value = self.sum()
        if self.at != len(self.tokens):
            raise Unreadable(f"what is '{self.peek()}'?")
        return value

    def sum(self) -> Expr:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        value = self.product()
        while self.peek() in ("+", "-"):
            sign = self.take()
            other = self.product()
            value = value + other if sign == "+" else value - other
        self.depth -= 1
        return value

    def product(self) -> Expr:
        value = self.signed()
        while True:
            token = self.peek()
            if token in TIMES:
                self.take()
                value = value * self.signed()
            elif token in OVER:
                self.take()
                value = value / self._nonzero(self.signed())
            elif self.starts_factor():
                value = value * self.power()
            else:
                return value

    @staticmethod
    def _nonzero(value: Expr) -> Expr:
        if value == 0:
            raise Unreadable("division by zero")
        return value

    def starts_factor(self) -> bool:
        token, kind = self.peek(), self.kind()
        if kind in ("number", "name"):
            return True
        return token in ("(", "[", "{") or (kind == "command" and self._is_atom(token))

    @staticmethod
    def _is_atom(command: str) -> bool:
        word = command[1:]
        return (
            word in FUNCTIONS or word in CONSTANTS or word in GREEK
            or word in ("frac", "sqrt", "binom", "lfloor", "lceil", "operatorname", "lvert")
        )  # fmt: skip

    def signed(self) -> Expr:
        if self.peek() == "-":
            self.take()
            return -self.signed()
        if self.peek() == "+":
            self.take()
            return self.signed()
        return self.power()

    def power(self) -> Expr:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        value = self.postfix(self.atom())
        if self.peek() in ("^", "**"):
            self.take()
            value = power(value, self.argument())
            value = self.postfix(value)
        self.depth -= 1
        return value

    def postfix(self, value: Expr) -> Expr:
        while self.peek() == "!":
            self.take()
            value = factorial(value)
        return value

    def argument(self) -> Expr:
        """An exponent: a braced group, a signed power, or in LaTeX one character."""
        if self.peek() == "{":
            return self.group("{")
        if self.peek() in ("-", "+"):
            return self.signed()
        return self.power()

    def group(self, opening: str) -> Expr:
        self.expect(opening)
        value = self.sum()
        self.expect(CLOSING[opening])
        return value

    def small(self) -> Expr:
        """The argument of ``\\frac`` or ``\\sqrt``: a group, or one digit or letter."""
        if self.peek() == "{":
            return self.group("{")
        if self.kind() == "number":
            text = self.take()
            if len(text) > 1 and text.isdigit():
                self.at -= 1
                self.tokens[self.at] = ("number", text[1:])
                text = text[0]
            return Rational(text)
        return self.atom()

    def atom(self) -> Expr:
        kind, token = self.kind(), self.take()
        if kind == "number":
            return self._number(token)
        if kind == "name":
            return self.name(token)
        if kind == "command":
            return self.command(token)
        if token in ("(", "[", "{"):
            self.at -= 1
            return self.group(token)
        if token == "|":
            value = self.sum()
            self.expect("|")
            return sympy.Abs(value)
        raise Unreadable(f"what is '{token}'?")

    def _number(self, token: str) -> Expr:
        value = Rational(token) if "." not in token else Rational(("0" if token[0] == "." else "") + token)
        is_mixed = "." not in token and self.peek() == "\\frac"
        if is_mixed and (fraction := self._proper_fraction()) is not None:
            return value + fraction
        return value

    def _proper_fraction(self) -> Expr | None:
        """``\\frac{1}{2}`` straight after a whole number makes a mixed number."""
        start, saved = self.at, list(self.tokens)
        self.take()
        try:
            above, below = self.small(), self.small()
        except Unreadable:
            above = below = Integer(0)
        if above.is_Integer and below.is_Integer and 0 < above < below:
            return above / below
        self.at, self.tokens = start, saved
        return None

    def name(self, token: str) -> Expr:
        if token == "sqrt" or token in FUNCTIONS:
            return self.function(token)
        if token in CONSTANTS and (token != "i" or self.complex_i):
            return CONSTANTS[token]
        if token in GREEK:
            return self.symbol(token)
        if len(token) == 1:
            return self.symbol(token)
        for word in sorted([*CONSTANTS, *FUNCTIONS, "sqrt", *GREEK], key=len, reverse=True):
            if len(word) > 1 and token.startswith(word) and len(token) - len(word) <= 2:
                return self._rest(word, token[len(word) :])
        if len(token) > 3 or token.lower() in SHORT_WORDS:
            raise Unreadable(f"'{token}' is a word")
        return self._rest(token[0], token[1:])

    def _rest(self, first: str, rest: str) -> Expr:
        """Letters written together are a product: put the rest back and read the first."""
        if rest:
            self.tokens.insert(self.at, ("name", rest))
        return self.name(first)

    def symbol(self, name: str) -> Expr:
        if self.peek() == "_":
            self.take()
            if self.peek() == "{":
                start = self.at
                self.take()
                while self.peek() not in ("}", ""):
                    self.take()
                self.expect("}")
                name += "_" + "".join(t for _, t in self.tokens[start + 1 : self.at - 1])
            else:
                name += "_" + self.take()
        return sympy.Symbol(name, real=True)

    def command(self, token: str) -> Expr:
        word = token[1:]
        if word == "frac":
            return self.small() / self._nonzero(self.small())
        if word == "binom":
            return binomial(self.small(), self.small())
        if word in ("lfloor", "lceil"):
            value = self.sum()
            self.expect(CLOSING[token])
            return sympy.floor(value) if word == "lfloor" else sympy.ceiling(value)
        if word == "lvert":
            value = self.sum()
            self.expect("\\rvert")
            return sympy.Abs(value)
        if word == "operatorname":
            self.expect("{")
            word = self.take()
            self.expect("}")
        if word == "sqrt" or word in FUNCTIONS:
            return self.function(word)
        if word in CONSTANTS:
            return CONSTANTS[word]
        if word in GREEK:
            return self.symbol(word)
        raise Unreadable(f"what is '{token}'?")

    def function(self, name: str) -> Expr:
        if name == "sqrt":
            return self.root()
        base = exponent = None
        while self.peek() in ("_", "^"):
            if self.take() == "_":
                base = self.small()
            else:
                exponent = self.argument()
        if name in ("max", "min", "gcd", "lcm"):
            return FUNCTIONS[name](*self.listed())
        value = self.function_argument()
        if exponent == -1:
            result = {"sin": sympy.asin, "cos": sympy.acos, "tan": sympy.atan}[name](value)
            exponent = None
        else:
            result = sympy.log(value, base) if base is not None else FUNCTIONS[name](value)
        return result if exponent is None else power(result, exponent)

    def listed(self) -> list[Expr]:
        opening = self.peek()
        if opening not in CLOSING:
            raise Unreadable("a list of arguments is missing")
        self.take()
        values = [self.sum()]
        while self.peek() == ",":
            self.take()
            values.append(self.sum())
        self.expect(CLOSING[opening])
        return values

    def root(self) -> Expr:
        degree: Expr = Integer(2)
        if self.peek() == "[":
            degree = self.group("[")
        value = self.group("(") if self.peek() == "(" else self.small()
        if degree.is_Integer and degree % 2 == 1 and value.is_real:
            return sympy.real_root(value, degree)
        return power(value, 1 / degree)

    def function_argument(self) -> Expr:
        if self.peek() in ("(", "{"):
            return self.power_of_group()
        value = -self.power() if self.peek() == "-" and self.take() else self.power()
        while self.starts_factor() and not self._is_function():
            value = value * self.power()
        return value

    def power_of_group(self) -> Expr:
        return self.group(self.peek())

    def _is_function(self) -> bool:
        token = self.peek()
        return token.lstrip("\\") in FUNCTIONS or token in ("(", "[")


@functools.lru_cache(maxsize=4096)
def parse_expression(text: str, complex_i: bool = True) -> Expr:
    """The expression as SymPy. Raises `Unreadable` (or its `TooLarge`) where it is not one."""
    try:
        value = Parser(text, complex_i).whole()
    except (TypeError, ValueError, ArithmeticError, RecursionError, AttributeError, KeyError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Unreadable(str(error)) from error
    if value.has(sympy.zoo, sympy.nan):
        raise Unreadable("undefined")
    return value
