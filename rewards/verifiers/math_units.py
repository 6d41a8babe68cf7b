"""Units that answers carry: their spellings, what they measure, how they convert."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Unit:
    """``kind`` is what it measures, empty for a counted thing such as apples; ``factor`` converts to the
    base unit."""

    name: str
    kind: str
    factor: Fraction


UNITS: dict[str, Unit] = {}


def _add(kind: str, factor: str | Fraction, *names: str) -> None:
    unit = Unit(names[0], kind, Fraction(factor))
    for name in names:
        UNITS[name.lower()] = unit


LENGTHS = [
    ("1e-9", "nm", "nanometer", "nanometre"), ("1e-6", "µm", "micrometer", "micrometre"),
    ("0.001", "mm", "millimeter", "millimetre"), ("0.01", "cm", "centimeter", "centimetre"),
    ("0.1", "dm", "decimeter", "decimetre"), ("1", "m", "meter", "metre"), ("1000", "km", "kilometer", "kilometre"),
    ("0.0254", "in", "inch", "inche"), ("0.3048", "ft", "foot", "feet"), ("0.9144", "yd", "yard"),
    ("1609.344", "mi", "mile"),
]  # fmt: skip
for factor, *names in LENGTHS:
    _add("length", factor, *names)
    squared, cubed = Fraction(factor) ** 2, Fraction(factor) ** 3
    for name in names:
        _add("area", squared, f"{name}^2", f"{name}2", f"{name}²", f"square {name}", f"square {name}s", f"sq {name}",
             f"{name} squared", f"sq. {name}")  # fmt: skip
        _add("volume", cubed, f"{name}^3", f"{name}3", f"{name}³", f"cubic {name}", f"cubic {name}s", f"cu {name}",
             f"{name} cubed")  # fmt: skip
        for hour in ("h", "hr", "hour"):
            _add(
                "speed",
                Fraction(factor) / 3600,
                f"{name}/{hour}",
                f"{name}s/{hour}",
                f"{name} per {hour}",
                f"{name}s per {hour}",
            )
        for second in ("s", "sec", "second"):
            _add(
                "speed",
                factor,
                f"{name}/{second}",
                f"{name}s/{second}",
                f"{name} per {second}",
                f"{name}s per {second}",
            )
            _add("acceleration", factor, f"{name}/{second}^2", f"{name} per {second} squared")
_add("speed", Fraction("1609.344") / 3600, "mph")
_add("speed", Fraction(1000, 3600), "kph", "kmh")
MEASURES = {
    "mass": [
        ("1e-6", "mg", "milligram"),
        ("0.001", "g", "gram"),
        ("1", "kg", "kilogram"),
        ("1000", "tonne", "t"),
        ("0.45359237", "lb", "pound"),
        ("0.028349523125", "oz", "ounce"),
    ],
    "time": [
        ("0.001", "ms", "millisecond"),
        ("1", "s", "sec", "second"),
        ("60", "min", "minute"),
        ("3600", "h", "hr", "hour"),
        ("86400", "day"),
        ("604800", "week"),
        ("31557600", "year", "yr"),
        ("2629800", "month"),
    ],
    "volume": [
        ("1e-6", "ml", "milliliter", "millilitre"),
        ("0.001", "l", "liter", "litre"),
        ("0.003785411784", "gallon", "gal"),
    ],
    "money": [("1", "dollar", "usd", "buck"), ("0.01", "cent")],
}
for measure, units in MEASURES.items():
    for factor, *names in units:
        _add(measure, factor, *names)
for names in (["j", "joule"], ["n", "newton"], ["w", "watt"], ["v", "volt"], ["hz", "hertz"], ["pa", "pascal"],
              ["k", "kelvin"], ["mol", "mole"], ["a", "ampere", "amp"], ["ohm", "omega"]):  # fmt: skip
    _add(names[0], "1", *names)
_add("angle", "1", "°", "degree", "deg")
_add("radian", "1", "rad", "radian")
_add("celsius", "1", "°c", "celsius", "degrees celsius", "degree celsius")
_add("fahrenheit", "1", "°f", "fahrenheit", "degrees fahrenheit", "degree fahrenheit")
_add("length_unit", "1", "unit", "units")
_add("area", "1", "square unit", "square units", "sq unit", "sq units", "unit^2", "units^2")
_add("volume_units", "1", "cubic unit", "cubic units", "unit^3", "units^3")
UNITS["°C"], UNITS["°F"] = UNITS["°c"], UNITS["°f"]
