//! Parses a kernel's body into statements, instructions, guards and operands.

use crate::error::{Error, Result};
use crate::lex::{Lexer, Token};

/// A statement of a body, with its line.
#[derive(Clone, Debug)]
pub(crate) struct Statement<'a> {
    pub(crate) line: u32,
    pub(crate) kind: Kind<'a>,
}

/// The kind of a statement.
#[derive(Clone, Debug)]
pub(crate) enum Kind<'a> {
    /// `{` opens a scope of names.
    Open,
    /// `}`.
    Close,
    /// `name:`
    Label(&'a str),
    /// `name: .branchtargets a, b;`
    Targets(&'a str, Vec<&'a str>),
    /// `.reg .type names;`
    Registers(&'a str, Vec<Names<'a>>),
    /// `.shared` or `.extern .shared`, without the words before the type.
    Shared(Variable<'a>),
    /// `@guard opcode operands;`
    Instruction(Instruction<'a>),
}

/// Names in a register declaration.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Names<'a> {
    /// A single name.
    One(&'a str),
    /// `prefix<count>`: prefix0, prefix1, …
    Range(&'a str, u32),
}

/// A variable in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Variable<'a> {
    pub(crate) name: &'a str,
    pub(crate) align: u32,
    /// The size in bytes, or `None` for an array of unknown length, `name[]`.
    pub(crate) size: Option<u32>,
}

/// An instruction as written.
#[derive(Clone, Debug)]
pub(crate) struct Instruction<'a> {
    /// Its text, from the guard to before the semicolon.
    pub(crate) text: &'a str,
    pub(crate) guard: Option<Guard<'a>>,
    pub(crate) opcode: &'a str,
    pub(crate) operands: Vec<Operand<'a>>,
}

/// `@p` or `@!p`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guard<'a> {
    pub(crate) predicate: &'a str,
    pub(crate) negated: bool,
}

/// An operand as written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Operand<'a> {
    /// A register, a label, a variable, or `_`.
    Name(&'a str),
    /// `!p`
    Not(&'a str),
    /// `p|q`
    Both(&'a str, &'a str),
    /// An integer.
    Integer(i128),
    /// `0f…`, as bits.
    Float(u32),
    /// `0d…`, as bits.
    Double(u64),
    /// `{a, b}`
    Vector(Vec<Operand<'a>>),
    /// `[base+offset]`
    Address(&'a str, i64),
    /// `[map, {x, y}]`
    Tensor(&'a str, Vec<Operand<'a>>),
}

/// Maximum nesting of brackets around an operand. PTX needs one level. The limit bounds the stack.
const MOST_BRACKETS: u32 = 8;

/// Parses a body. The lexer starts after its opening brace and ends after its closing brace.
pub(crate) fn body<'a>(text: &'a str, lexer: &mut Lexer<'a>) -> Result<Vec<Statement<'a>>> {
    let mut statements = Vec::new();
    let mut depth = 0;
    loop {
        let token = lexer.some("a statement or `}`")?;
        let kind = match token.text {
            "{" => {
                depth += 1;
                Kind::Open
            }
            "}" if depth == 0 => return Ok(statements),
            "}" => {
                depth -= 1;
                Kind::Close
            }
            ";" => continue,
            ".reg" => registers(lexer)?,
            ".shared" => Kind::Shared(variable(lexer)?),
            // Arguments of a call, which lowering refuses.
            ".param" => {
                variable(lexer)?;
                continue;
            }
            ".extern" => {
                lexer.sign(".shared")?;
                Kind::Shared(variable(lexer)?)
            }
            // Launch facts and source locations are not executed.
            ".maxntid" | ".reqntid" | ".minnctapersm" | ".maxnreg" | ".pragma" | ".loc" => {
                while !lexer.take(";")? {
                    lexer.some("`;`")?;
                }
                continue;
            }
            "@" => {
                let negated = lexer.take("!")?;
                let predicate = lexer.word("a predicate")?.text;
                let opcode = lexer.word("an opcode")?;
                instruction(text, lexer, token, Some(Guard { predicate, negated }), opcode)?
            }
            _ if token.text.starts_with('.') || !token.is_word() => {
                let message = format!("`{}` does not begin a statement known here", token.text);
                return Err(Error::Syntax { line: token.line, message });
            }
            name if lexer.take(":")? => {
                if lexer.take(".branchtargets")? {
                    Kind::Targets(name, list(lexer, |lexer| Ok(lexer.word("a label")?.text))?)
                } else {
                    Kind::Label(name)
                }
            }
            _ => instruction(text, lexer, token, None, token)?,
        };
        statements.push(Statement { line: token.line, kind });
    }
}

/// `item, item, …;`
fn list<'a, T>(lexer: &mut Lexer<'a>, mut item: impl FnMut(&mut Lexer<'a>) -> Result<T>) -> Result<Vec<T>> {
    let mut items = Vec::new();
    loop {
        items.push(item(lexer)?);
        if lexer.take(";")? {
            return Ok(items);
        }
        lexer.sign(",")?;
    }
}

fn registers<'a>(lexer: &mut Lexer<'a>) -> Result<Kind<'a>> {
    let ty = lexer.word("a register type")?.text;
    let names = list(lexer, |lexer| {
        let name = lexer.word("a register")?.text;
        if !lexer.take("<")? {
            return Ok(Names::One(name));
        }
        let count = size(lexer)?;
        lexer.sign(">")?;
        Ok(Names::Range(name, count))
    })?;
    Ok(Kind::Registers(ty, names))
}

/// Parses `.align 4 .b8 name[16];` after `.shared`.
pub(crate) fn variable<'a>(lexer: &mut Lexer<'a>) -> Result<Variable<'a>> {
    let aligned = lexer.take(".align")?;
    let align = if aligned { Some(size(lexer)?) } else { None };
    let ty = lexer.word("a type")?;
    let element = type_bytes(ty)?;
    let name = lexer.word("a name")?.text;
    let mut bytes = Some(element);
    if lexer.take("[")? {
        bytes = None;
        if !lexer.take("]")? {
            bytes = size(lexer)?.checked_mul(element);
            if bytes.is_none() {
                return Err(lexer.error("the variable is too large"));
            }
            lexer.sign("]")?;
        }
    }
    lexer.sign(";")?;
    Ok(Variable { name, align: align.unwrap_or(element), size: bytes })
}

/// Returns the size of a fundamental type (ISA 5.2.1).
pub(crate) fn type_bytes(ty: Token) -> Result<u32> {
    match ty.text {
        ".b8" | ".u8" | ".s8" => Ok(1),
        ".b16" | ".u16" | ".s16" | ".f16" | ".bf16" => Ok(2),
        ".b32" | ".u32" | ".s32" | ".f32" | ".f16x2" | ".bf16x2" => Ok(4),
        ".b64" | ".u64" | ".s64" | ".f64" => Ok(8),
        other => Err(Error::Syntax { line: ty.line, message: format!("`{other}` is not a type known here") }),
    }
}

/// Parses a small unsigned number.
pub(crate) fn size(lexer: &mut Lexer) -> Result<u32> {
    let token = lexer.word("a number")?;
    integer(token.text)
        .and_then(|number| u32::try_from(number).ok())
        .ok_or_else(|| Error::Syntax { line: token.line, message: format!("`{}` is not a size", token.text) })
}

/// Parses an integer constant (ISA 4.5.1) without a sign.
fn integer(text: &str) -> Option<i128> {
    let text = text.strip_suffix('U').unwrap_or(text);
    let lower = text.as_bytes();
    let (digits, radix) = match lower {
        [b'0', b'x' | b'X', ..] => (&text[2..], 16),
        [b'0', b'b' | b'B', ..] => (&text[2..], 2),
        [b'0', _, ..] => (&text[1..], 8),
        _ => (text, 10),
    };
    u64::from_str_radix(digits, radix).ok().map(i128::from)
}

fn instruction<'a>(
    text: &'a str,
    lexer: &mut Lexer<'a>,
    first: Token<'a>,
    guard: Option<Guard<'a>>,
    opcode: Token<'a>,
) -> Result<Kind<'a>> {
    let mut operands = Vec::new();
    let mut end = opcode.end();
    if lexer.peek()?.is_some_and(|token| token.text == ";") {
        lexer.next()?;
    } else {
        loop {
            operands.push(operand(lexer)?);
            let token = lexer.some("`,` or `;`")?;
            match token.text {
                "," => {}
                ";" => {
                    end = token.start;
                    break;
                }
                other => {
                    let message = format!("expected `,` or `;`, found `{other}`");
                    return Err(Error::Syntax { line: token.line, message });
                }
            }
        }
    }
    let text = text[first.start..end].trim_end();
    Ok(Kind::Instruction(Instruction { text, guard, opcode: opcode.text, operands }))
}

fn operand<'a>(lexer: &mut Lexer<'a>) -> Result<Operand<'a>> {
    operand_within(lexer, 0)
}

/// Parses an operand at bracket nesting `depth`.
fn operand_within<'a>(lexer: &mut Lexer<'a>, depth: u32) -> Result<Operand<'a>> {
    let token = lexer.some("an operand")?;
    if depth > MOST_BRACKETS {
        return Err(Error::Syntax { line: token.line, message: "too many brackets".into() });
    }
    match token.text {
        "{" => Ok(Operand::Vector(vector(lexer, depth)?)),
        "[" => {
            let base = lexer.word("an address")?.text;
            if lexer.take(",")? {
                lexer.sign("{")?;
                let corner = vector(lexer, depth)?;
                lexer.sign("]")?;
                return Ok(Operand::Tensor(base, corner));
            }
            let mut offset = 0;
            if lexer.take("+")? {
                offset = signed(lexer)?;
            } else if lexer.take("-")? {
                offset = -signed(lexer)?;
            }
            lexer.sign("]")?;
            let offset = i64::try_from(offset).map_err(|_| lexer.error("an offset out of range"))?;
            Ok(Operand::Address(base, offset))
        }
        "(" => {
            // Arguments of a call, which lowering refuses.
            let mut items = Vec::new();
            while !lexer.take(")")? {
                if !lexer.take(",")? {
                    items.push(operand_within(lexer, depth + 1)?);
                }
            }
            Ok(Operand::Vector(items))
        }
        "!" => Ok(Operand::Not(lexer.word("a predicate")?.text)),
        "-" => Ok(Operand::Integer(-signed(lexer)?)),
        _ if !token.is_word() => {
            let message = format!("expected an operand, found `{}`", token.text);
            Err(Error::Syntax { line: token.line, message })
        }
        word if word.as_bytes()[0].is_ascii_digit() => constant(token),
        word => {
            if lexer.take("|")? {
                return Ok(Operand::Both(word, lexer.word("a predicate")?.text));
            }
            Ok(Operand::Name(word))
        }
    }
}

/// Parses the operands of a vector, from after its opening brace to after its closing brace.
fn vector<'a>(lexer: &mut Lexer<'a>, depth: u32) -> Result<Vec<Operand<'a>>> {
    let mut items = Vec::new();
    loop {
        items.push(operand_within(lexer, depth + 1)?);
        if lexer.take("}")? {
            return Ok(items);
        }
        lexer.sign(",")?;
    }
}

/// Parses an integer with an optional minus.
fn signed(lexer: &mut Lexer) -> Result<i128> {
    let negative = lexer.take("-")?;
    let token = lexer.word("a number")?;
    match constant(token)? {
        Operand::Integer(number) => Ok(if negative { -number } else { number }),
        _ => Err(Error::Syntax { line: token.line, message: format!("`{}` is not an integer", token.text) }),
    }
}

/// Parses a constant (ISA 4.5) without a sign. Decimal floats are not supported.
fn constant<'a>(token: Token) -> Result<Operand<'a>> {
    let text = token.text;
    let prefixed = text.split_at_checked(2);
    let operand = match prefixed {
        Some(("0f" | "0F", hex)) if hex.len() == 8 => u32::from_str_radix(hex, 16).ok().map(Operand::Float),
        Some(("0d" | "0D", hex)) if hex.len() == 16 => u64::from_str_radix(hex, 16).ok().map(Operand::Double),
        Some(("0f" | "0F" | "0d" | "0D", _)) => None,
        _ => integer(text).map(Operand::Integer),
    };
    operand.ok_or_else(|| Error::Syntax {
        line: token.line,
        message: format!("`{text}` is not a constant known here"),
    })
}
