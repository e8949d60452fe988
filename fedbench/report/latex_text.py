"""Text for LaTeX: names and error messages that any TeX engine can typeset."""

from __future__ import annotations

import re
import unicodedata

COMMANDS = {
    **{"\\": "textbackslash", "~": "textasciitilde", "^": "textasciicircum", "<": "textless"},
    **{">": "textgreater", "|": "textbar", "`": "textasciigrave", "'": "textquotesingle"},
    '"': "textquotedblright",  # a straight one is not in every font encoding
    **{"–": "textendash", "—": "textemdash", "“": "textquotedblleft", "”": "textquotedblright"},
    **{"‘": "textquoteleft", "’": "textquoteright", "…": "dots", "ß": "ss", "ø": "o", "Ø": "O"},
    **{"æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE", "ł": "l", "Ł": "L"},
}
MATH = {
    **{"±": "pm", "×": "times", "≤": "leq", "≥": "geq", "→": "to", "∞": "infty", "µ": "mu"},
    **{"α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta"},
    **{"η": "eta", "θ": "theta", "ι": "iota", "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu"},
    **{"ξ": "xi", "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau", "υ": "upsilon", "φ": "phi"},
    **{"χ": "chi", "ψ": "psi", "ω": "omega", "Γ": "Gamma", "Δ": "Delta", "Θ": "Theta"},
    **{"Λ": "Lambda", "Ξ": "Xi", "Π": "Pi", "Σ": "Sigma", "Φ": "Phi", "Ψ": "Psi", "Ω": "Omega"},
}
ACCENTS = {
    **{"\u0300": "`", "\u0301": "'", "\u0302": "^", "\u0303": "~", "\u0304": "=", "\u0306": "u"},
    **{"\u0307": ".", "\u0308": '"', "\u030a": "r", "\u030b": "H", "\u030c": "v", "\u0327": "c"},
}


def escape(text: str) -> str:
    """Return ASCII that LaTeX prints as `text`; what pdfTeX cannot print becomes [U+4E2D]."""
    one_line = unicodedata.normalize("NFC", " ".join(text.split()))
    escaped = "".join(map(_escape_character, one_line))
    return re.sub(r"([-,])(?=\1)", r"\1{}", escaped)  # -- and ,, would become other characters


def comment(text: str) -> str:
    """Return a line of a LaTeX comment; nothing in `text` can end it."""
    return "% " + "".join(character if character.isprintable() else " " for character in text)


def _escape_character(character: str) -> str:
    if character in COMMANDS:
        return f"\\{COMMANDS[character]}{{}}"
    if character in MATH:
        return f"$\\{MATH[character]}$"
    if character in "[*":
        return f"{{{character}}}"  # a row that starts with it would pass it to the \\ before
    if character in "&%$#_{}":
        return f"\\{character}"
    if " " <= character <= "~":
        return character
    parts = unicodedata.normalize("NFD", character)
    if len(parts) == 2 and parts[0].isascii() and parts[0].isalpha() and parts[1] in ACCENTS:
        return f"\\{ACCENTS[parts[1]]}{{{parts[0]}}}"
    return f"{{[}}U+{ord(character):04X}]"
