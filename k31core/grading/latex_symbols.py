"""What the LaTeX macros of answers stand for. A macro that is in none of these tables stands for nothing."""

_GREEK = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
    "pi",
    "rho",
    "sigma",
    "tau",
    "upsilon",
    "phi",
    "chi",
    "psi",
    "omega",
    "Gamma",
    "Delta",
    "Theta",
    "Lambda",
    "Xi",
    "Pi",
    "Sigma",
    "Upsilon",
    "Phi",
    "Psi",
    "Omega",
]
_GREEK_TEXT = "αβγδϵζηθικλμνξπρστυϕχψωΓΔΘΛΞΠΣΥΦΨΩ"

_FUNCTIONS = [
    "cos",
    "sin",
    "tan",
    "arccos",
    "arcsin",
    "arctan",
    "cosh",
    "sinh",
    "tanh",
    "arccosh",
    "arcsinh",
    "arctanh",
    "ln",
    "log",
    "exp",
    "max",
    "min",
    "sup",
    "inf",
    "lim",
]

_DOTS = dict.fromkeys(("dots", "ldots", "dotsc", "dotsb", "dotsm", "dotsi", "dotso"), "…")

SYMBOLS: dict[str, str] = {
    **dict(zip(_GREEK, _GREEK_TEXT, strict=True)),
    **{name: name for name in _FUNCTIONS},
    **_DOTS,
    **{
        "varepsilon": "ε",
        "varphi": "φ",
        "vartheta": "ϑ",
        "varrho": "ϱ",
        "varsigma": "ς",
        "varpi": "ϖ",
        "varkappa": "ϰ",
    },
    **{
        "limsup": "lim sup",
        "liminf": "lim inf",
        "prime": "'",
        "hbar": "ħ",
        "ell": "ℓ",
        "aleph": "ℵ",
        "i": "ı",
        "j": "ȷ",
    },
    **{"forall": "∀", "exists": "∃", "nexists": "∄", "partial": "∂", "nabla": "∇", "complement": "∁"},
    **{"varnothing": "∅", "emptyset": "∅", "in": "∈", "notin": "∉", "ni": "∋", "setminus": "∖", "smallsetminus": "∖"},
    **{"prod": "∏", "coprod": "∐", "sum": "∑", "int": "∫", "iint": "∬", "iiint": "∭", "oint": "∮"},
    **{
        "ast": "∗",
        "circ": "∘",
        "bullet": "∙",
        "cdot": "·",
        "times": "×",
        "div": "÷",
        "pm": "±",
        "mp": "∓",
        "infty": "∞",
    },
    **{
        "otimes": "⊗",
        "oplus": "⊕",
        "bigotimes": "⊗",
        "bigoplus": "⊕",
        "wedge": "∧",
        "vee": "∨",
        "cap": "∩",
        "cup": "∪",
    },
    **{
        "propto": "∝",
        "parallel": "∥",
        "nparallel": "∦",
        "perp": "⊥",
        "angle": "∠",
        "sim": "∼",
        "simeq": "≃",
        "cong": "≅",
    },
    **{"approx": "≈", "neq": "≠", "equiv": "≡", "le": "≤", "ge": "≥", "leq": "≤", "geq": "≥", "leqslant": "⩽"},
    **{"geqslant": "⩾", "leqq": "≦", "geqq": "≧", "ll": "≪", "gg": "≫", "prec": "≺", "succ": "≻"},
    **{"subset": "⊂", "supset": "⊃", "subseteq": "⊆", "supseteq": "⊇", "subsetneq": "⊊", "supsetneq": "⊋"},
    **{"uparrow": "↑", "downarrow": "↓", "rightarrow": "→", "to": "→", "leftarrow": "←", "longrightarrow": "⟶"},
    **{"longleftarrow": "⟵", "Rightarrow": "⇒", "Leftarrow": "⇐", "Leftrightarrow": "⇔", "leftrightarrow": "↔"},
    **{
        "mapsto": "↦",
        "cdots": "⋯",
        "ddots": "⋱",
        "vdots": "⋮",
        "langle": "⟨",
        "rangle": "⟩",
        "lvert": "|",
        "rvert": "|",
    },
    **{"vert": "|", "mid": "|", "nmid": "∤", "lVert": "‖", "rVert": "‖", "Vert": "‖", "lfloor": "⌊", "rfloor": "⌋"},
    **{"lceil": "⌈", "rceil": "⌉", "textdegree": "°", "texttimes": "×", "textdiv": "÷", "textpm": "±", "dag": "†"},
    **{",": " ", ";": " ", ":": " ", " ": " ", "!": "", "quad": "  ", "qquad": "    ", "\\": "\n", "backslash": "\\"},
    **{"{": "{", "}": "}", "%": "%", "$": "$", "#": "#", "_": "_", "&": "&", "-": "\xad"},
}
"""Macros without arguments."""

ARGUMENT_TEXT: dict[str, str] = {
    **dict.fromkeys(
        [
            "emph",
            "textrm",
            "textit",
            "textbf",
            "textsc",
            "textsl",
            "text",
            "mathrm",
            "overline",
            "underline",
            "widehat",
            "widetilde",
            "overleftarrow",
            "overrightarrow",
            "overbrace",
            "underbrace",
            "overbracket",
            "underbracket",
        ],
        "",
    ),
    **{"mathbf": "bold", "mathit": "italic", "mathsf": "sans", "mathbb": "doublestruck", "mathtt": "monospace"},
    **{"mathcal": "script", "mathscr": "script", "mathfrak": "fraktur"},
}
"""Macros that stand for their argument, in a style of letters."""

ACCENTS: dict[str, str] = {
    **{"bar": "\u0305", "hat": "\u0302", "tilde": "\u0303", "vec": "\u20d7", "dot": "\u0307", "ddot": "\u0308"},
    **{
        "'": "\u0301",
        "`": "\u0300",
        '"': "\u0308",
        "^": "\u0302",
        "=": "\u0304",
        "~": "\u0303",
        "c": "\u0327",
        "v": "\u030c",
    },
    "not": "\u0338",
}

DROPPED_ARGUMENTS: dict[str, int] = {
    "mbox": 1,
    "hspace": 1,
    "label": 1,
    "color": 1,
    "textcolor": 1,
    "input": 1,
    "include": 1,
}
"""Macros that vanish with this many arguments (`\\textcolor{red}{5}` keeps its second)."""

BRACKETED = frozenset(f"{size}{side}" for size in ("big", "Big", "bigg", "Bigg") for side in ("", "l", "r", "m"))
"""Sizes of brackets: the bracket after them stays."""

_FIRST_LETTERS = {
    # style: code points of A and a in the block of mathematical letters (digits keep their form)
    "bold": (0x1D400, 0x1D41A),
    "italic": (0x1D434, 0x1D44E),
    "script": (0x1D49C, 0x1D4B6),
    "fraktur": (0x1D504, 0x1D51E),
    "doublestruck": (0x1D538, 0x1D552),
    "sans": (0x1D5A0, 0x1D5BA),
    "monospace": (0x1D670, 0x1D68A),
}
_OUTSIDE_THE_BLOCK = {
    "italic": {"h": "ℎ"},
    "script": dict(zip("BEFHILMRego", "ℬℰℱℋℐℒℳℛℯℊℴ", strict=True)),
    "fraktur": dict(zip("CHIRZ", "ℭℌℑℜℨ", strict=True)),
    "doublestruck": dict(zip("CHNPQRZ", "ℂℍℕℙℚℝℤ", strict=True)),
}


def math_letters(text: str, style: str) -> str:
    """`text` in mathematical letters of `style` (the empty style leaves it as it is)."""
    if not style:
        return text
    upper, lower = _FIRST_LETTERS[style]
    outside = _OUTSIDE_THE_BLOCK.get(style, {})
    letters = []
    for char in text:
        if char in outside:
            letters.append(outside[char])
        elif "A" <= char <= "Z":
            letters.append(chr(upper + ord(char) - ord("A")))
        elif "a" <= char <= "z":
            letters.append(chr(lower + ord(char) - ord("a")))
        else:
            letters.append(char)
    return "".join(letters)
