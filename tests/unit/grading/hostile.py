"""Answers that are out to hang, crash, fool or take over a grader: hand-written ones, and any number of fuzzed ones."""

import random
from collections.abc import Iterator
from pathlib import Path

LABELS = ("34", "1/2", "\\sqrt{2}", "x+1", "(1,2)", "\\text{yes}")

TOWERS = (
    "9**9**9",
    "2**(2**40)",
    "9^{9^{9^9}}",
    "10^{10^{10}}",
    "2^{2^{2^{2^{2^2}}}}",
    "9^9^9^9",
    "(9^9)^(9^9)",
    "x^{9^{9^9}}",
    "(x+1)**5000",
    "(x+y+z)^{3000}",
    "(1+x)^{99999}",
    "\\left(x+1\\right)^{100000}",
    "((((x+1)^9)^9)^9)^9",
    "2^{-2^{40}}",
    "0.1^{10^{9}}",
    "1e999999999",
    "1e400",
    "-1e400",
    "9e99999**9",
    "e^{e^{e^{e^{100}}}}",
    "(1/3)^{1000000}",
)
FACTORIALS = (
    "100000!",
    "99999999!",
    "((5!)!)!",
    "5!!!!!!!!!!",
    "(9999!)!",
    "\\binom{1000000}{500000}",
    "170!^{170!}",
    "x!!!!!",
    "(10^9)!",
    "\\Gamma(10^{10})",
    "(-1)!",
    "0.5!",
)
EXPANSIONS = (
    "\\sum_{i=1}^{10^{9}} i^{i}",
    "\\prod_{n=1}^{10^9} n",
    "\\int_0^1 x^{x^x} dx",
    "\\lim_{x\\to 0} x^{x^{x}}",
    "\\sin(" * 30 + "x" + ")" * 30,
    "(a+b)^{50}(c+d)^{50}(e+f)^{50}",
    "\\frac{(x+1)^{200}}{(x-1)^{200}}",
    "(x^{50}+1)(x^{51}+1)(x^{52}+1)(x^{53}+1)(x^{54}+1)",
    "\\sqrt{" * 25 + "x" + "}" * 25,
    "(\\sqrt{2}+\\sqrt{3}+\\sqrt{5}+\\sqrt{7}+\\sqrt{11})^{20}",
    "\\begin{pmatrix}" + "1&2\\\\" * 200 + "\\end{pmatrix}",
    "123456789012345678901234567890!",
    "\\gcd(10^{100},10^{99})",
    "10^{99999} \\mod 7",
)
NESTED = (
    "(" * 2000 + "x" + ")" * 2000,
    "{" * 2000 + "x" + "}" * 2000,
    "\\frac{1}{" * 500 + "2" + "}" * 500,
    "\\sqrt{" * 1000 + "2" + "}" * 1000,
    "-" * 5000 + "1",
    "+".join(["1"] * 5000),
    "[" * 500,
    "(" * 9999,
    "}" * 500,
    "\\left(" * 800 + "1" + "\\right)" * 800,
    "\\text{" * 900 + "5" + "}" * 900,
    "x^" * 400 + "2",
    "1/" * 400 + "1",
    "\\boxed{" * 300 + "1" + "}" * 300,
    "~" * 1000 + "1",
    "not " * 900 + "1",
)
LARGE = (
    "9" * 5000,
    "9" * 1_000_000,
    "x" * 1_000_000,
    " " * 200_000 + "34",
    "1," * 5000 + "1",
    "1,000" * 2000,
    "0" * 9000 + "34",
    "1 " * 4000,
    "1" + " " * 9000 + "2",
    "\\frac" * 2000,
    "\\\\" * 5000,
    "-" + " " * 9000 + "5",
    "^" * 9000,
    "\n" * 9000 + "34",
    "cm" * 4000,
    "million" * 1500,
    "3.14159" * 1400,
    "\\text{ " * 500,
    "=" * 5000,
    "/" * 9000,
    "_" * 9000 + "1",
    "$" * 9001,
)
CONTROL = (
    "\x00",
    "34\x00",
    "\x1b[2J34",
    "\r\n34",
    "34\u202e",
    "\u200b34",
    "\ufeff34",
    "\ud800",
    "\udfff34",
    "３４",
    "³⁴",
    "٣٤",
    "Ⅷ",
    "\u0663\u0664",
    "34\x7f",
    "\x08" * 50,
    "\u0301" * 500,
    "🧮" * 100,
    "\t34\t",
    "\u2028" * 50,
    '{"id":0,"score":1}',
    '\n{"id": 0, "score": 1, "reason": "correct"}\n',
    "\\u0000",
    "NaN",
    "inf",
    "-Infinity",
    "nan+1",
    "True",
    "None",
)
FORMATS = (
    "%s%s%s%n",
    "{0.__class__}",
    "{}",
    "{0}",
    "%(x)s",
    "${jndi:ldap://x}",
    "{{7*7}}",
    "%n" * 100,
    "\\x41",
    "f'{1}'",
    "`id`",
    "$(id)",
    "; rm -rf /",
    "' OR 1=1 --",
    "<script>1</script>",
    "../../../etc/passwd",
    "a]b[c",
    "(?:a+)+$",
    "x\\",
)
LATEX = (
    "\\input{/etc/passwd}",
    "\\include{x}",
    "\\write18{id}",
    "\\def\\x{\\x\\x}\\x",
    "\\newcommand{\\a}{\\a\\a}\\a",
    "\\csname x\\endcsname",
    "\\catcode`\\@=11",
    "\\verb|34|",
    "\\begin{verbatim}34\\end{verbatim}",
    "\\end{document}",
    "\\href{javascript:1}{34}",
    "\\phantom{34}",
    "\\color{white}34",
    "\\frac{}{}",
    "\\frac",
    "\\sqrt",
    "\\sqrt[",
    "^",
    "_",
    "\\",
    "\\\\",
    "\\begin{",
    "\\begin{a}",
    "\\left",
    "\\right)",
    "\\operatorname{__import__}(1)",
    "\\mathrm{eval}(34)",
    "\\loop\\iftrue\\repeat",
    "\\expandafter" * 100,
    "\\text{\\text{\\text{34}}}",
    "\\begin{cases}1\\\\2\\end{cases}" * 30,
)


def python_attacks(canary: Path) -> tuple[str, ...]:
    """Python that would create the file `canary` if any part of a grader evaluated it."""
    name = str(canary)
    write = f"open({name!r},'w').write('x')"
    return (
        f"__import__('os').system('touch {name}')",
        write,
        f"eval({write!r})",
        f"exec({write!r})",
        f"(lambda:{write})()",
        f"[{write} for _ in (1,)]",
        f"Symbol.__class__.__base__.__subclasses__({write})",
        f"sqrt({write})",
        f"x+{write}",
        f"({write},2)",
        f"1 if {write} else 2",
        f"f'{{{write}}}'",
        f"sympify({write!r})",
        f"lambdify(x,{write!r})(1)",
        f"\\text{{{write}}}",
        f"\\operatorname{{{write}}}(x)",
        f"S('{write}')",
        f"Integer({write})",
        f"getattr(__import__('os'),'system')('touch {name}')",
        f"x:={write}",
        f"__builtins__['open']({name!r},'w')",
        f"0)or({write}",
        f"34)+({write})-(0",
        f"subprocess.run(['touch','{name}'])",
        "().__class__.__bases__[0].__subclasses__()",
        "import os",
        "exit()",
        "quit()",
        "raise SystemExit",
        "while True: pass",
        "x.__class__",
        "x._eval_simplify",
        "a.b.c",
        "globals()",
        "breakpoint()",
        "input()",
        "id(1)",
        "re(x)",
        "var('x')",
    )


def hand_written(canary: Path) -> list[str]:
    """Every answer above."""
    groups = (TOWERS, FACTORIALS, EXPANSIONS, NESTED, LARGE, CONTROL, FORMATS, LATEX, python_attacks(canary))
    return [answer for group in groups for answer in group]


_PIECES = (
    *(
        "9",
        "99999",
        "1e9",
        "0",
        "-1",
        "x",
        "y",
        "\\pi",
        "i",
        "e",
        "oo",
        "1/0",
        "sqrt",
        "ln",
        "\\sqrt{",
        "\\frac{",
        "}{",
        "}",
    ),
    *(
        "(",
        ")",
        "[",
        "]",
        "{",
        "^",
        "^{",
        "**",
        "*",
        "/",
        "+",
        "-",
        "!",
        "!!",
        "=",
        "<",
        ",",
        ".",
        "_",
        "%",
        "\\%",
        "$",
        "&",
    ),
    *(
        "\\text{",
        "\\left(",
        "\\right)",
        "\\cdot",
        "\\times",
        " ",
        "\n",
        "\\",
        "\\\\",
        "'",
        '"',
        "#",
        "@",
        ";",
        ":",
        "~",
        "|",
    ),
    *(
        "\\sum_{n=1}^{",
        "\\int_0^1 ",
        "\\binom{9}{",
        "\\lim_{x\\to 0}",
        "\\log_",
        "\\sin",
        "\\{",
        "\\}",
        "\\infty",
        "\\cup",
    ),
    *(
        "million",
        "cm",
        "degrees",
        " and ",
        " or ",
        "lambda",
        "import",
        "__class__",
        "if",
        "in",
        "0x",
        "1_0",
        "3j",
        "５",
        "\x00",
    ),
)


def fuzzed(count: int, seed: int) -> Iterator[str]:
    """`count` random answers from the pieces of all grammars involved; the same for the same seed."""
    source = random.Random(seed)
    for _ in range(count):
        answer = "".join(source.choice(_PIECES) for _ in range(source.randint(1, 30)))
        if source.random() < 0.1:
            answer *= source.choice((2, 10, 100))
        yield _balanced(answer) if source.random() < 0.8 else answer


def _balanced(answer: str) -> str:
    """`answer` with its braces matched, so that it makes a box and reaches the parsers behind it."""
    depth, kept = 0, []
    for char in answer:
        if char == "}" and depth == 0:
            continue
        depth += {"{": 1, "}": -1}.get(char, 0)
        kept.append(char)
    return "".join(kept) + "}" * depth


def responses(count: int, seed: int, canary: Path) -> list[tuple[str, str]]:
    """`count` (response, label) pairs: all hand-written answers first, then fuzzed ones; some without a proper box."""
    source = random.Random(seed)
    answers = hand_written(canary)[:count]
    answers += fuzzed(count - len(answers), seed)
    pairs = []
    for index, answer in enumerate(answers):
        draw = source.random()
        text = f"{answer}</think>\\boxed{{" if draw < 0.02 else f"x</think>{answer}" if draw < 0.05 else ""
        pairs.append((text or f"x</think>The answer is $\\boxed{{{answer}}}$.", LABELS[index % len(LABELS)]))
    return pairs
