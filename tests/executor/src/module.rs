//! A PTX module and its kernels. Kernels are lowered when they are first requested.

use std::sync::{Arc, OnceLock};

use crate::declared::{ModuleVariable, Parameter};
use crate::error::{Error, Result};
use crate::lex::Lexer;
use crate::lower::{self, Placement};
use crate::parse::{self, Statement};
use crate::program::Program;

/// A PTX module, parsed up to the kernels' signatures.
///
/// Bodies are parsed and lowered when a kernel is first requested.
#[derive(Debug)]
pub struct Module {
    text: Arc<str>,
    target: String,
    shared: Vec<ModuleVariable>,
    global: Vec<ModuleVariable>,
    kernels: Vec<Entry>,
    placement: Placement,
}

#[derive(Debug)]
struct Entry {
    name: String,
    parameters: Vec<Parameter>,
    /// The offset after the body's opening brace.
    body: usize,
    line: u32,
    kernel: OnceLock<Result<Kernel>>,
}

/// A kernel that is ready to run.
#[derive(Debug, Clone)]
pub struct Kernel {
    pub(crate) name: String,
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) text: Arc<str>,
    pub(crate) program: Arc<Program>,
}

impl Module {
    /// Parses a module.
    ///
    /// # Errors
    ///
    /// [`Error::Syntax`] for text outside of kernels' bodies. [`Module::kernel`] returns the errors
    /// of bodies.
    pub fn parse(text: &str) -> Result<Self> {
        let text: Arc<str> = text.into();
        let mut lexer = Lexer::new(&text, 0, 1);
        let mut target = String::new();
        let (mut shared, mut global, mut kernels) = (Vec::new(), Vec::new(), Vec::<Entry>::new());
        while let Some(token) = lexer.next()? {
            match token.text {
                ".version" | ".address_size" => {
                    let value = lexer.word("a number")?;
                    if token.text == ".address_size" && value.text != "64" {
                        return Err(lexer.error("addresses must have 64 bits"));
                    }
                }
                ".target" => {
                    target = lexer.word("a target")?.text.into();
                    while lexer.take(",")? {
                        lexer.word("a target option")?;
                    }
                }
                ".visible" | ".extern" | ".weak" => {}
                ".shared" => shared.push(parse::variable(&mut lexer)?.into()),
                // Zeros (ISA 5.4.4). Initializers would come before the semicolon and are not
                // supported.
                ".global" => global.push(parse::variable(&mut lexer)?.into()),
                ".entry" => kernels.push(entry(&mut lexer)?),
                // Lowering refuses kernels that call functions. Other kernels are unaffected.
                ".func" => skip_function(&mut lexer)?,
                other => {
                    let message = format!("`{other}` at the top of a module is not known here");
                    return Err(Error::Syntax { line: token.line, message });
                }
            }
        }
        Ok(Self { text, target, shared, global, kernels, placement: Placement::default() })
    }

    /// Places shared memory as on a GPU: the variables from the address `first` on, without gaps,
    /// and shared memory at `window` among generic addresses.
    ///
    /// By default variables have gaps between them and exactly their alignment. Call this function
    /// before [`Self::kernel`]: it does not change a kernel that is lowered already.
    #[must_use]
    pub fn with_shared_at(mut self, first: u32, window: u64) -> Self {
        self.placement = Placement { first: Some(first), window };
        self
    }

    /// Returns the names of the kernels, in the order of the text.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.kernels.iter().map(|entry| entry.name.as_str())
    }

    /// Returns a kernel, which is parsed and lowered on the first call.
    ///
    /// # Errors
    ///
    /// [`Error::NoKernel`], or the error in the kernel's body.
    pub fn kernel(&self, name: &str) -> Result<&Kernel> {
        let entry = self.kernels.iter().find(|entry| entry.name == name);
        let entry = entry.ok_or_else(|| Error::NoKernel(name.into()))?;
        let kernel = entry.kernel.get_or_init(|| {
            let mut lexer = Lexer::new(&self.text, entry.body, entry.line);
            let body: Vec<Statement> = parse::body(&self.text, &mut lexer)?;
            let variables = [&self.shared[..], &self.global];
            let (name, parameters) = (entry.name.clone(), entry.parameters.clone());
            let program =
                lower::lower(&self.text, &self.target, &body, &parameters, variables, self.placement)?;
            Ok(Kernel { name, parameters, text: self.text.clone(), program: Arc::new(program) })
        });
        kernel.as_ref().map_err(Clone::clone)
    }
}

/// Parses `name ( parameters ) directives { body }` after `.entry`.
fn entry(lexer: &mut Lexer) -> Result<Entry> {
    let name = lexer.word("a kernel's name")?.text.to_owned();
    let mut parameters = Vec::new();
    if lexer.take("(")? && !lexer.take(")")? {
        loop {
            let parameter = parameter(lexer, &parameters)?;
            parameters.push(parameter);
            if lexer.take(")")? {
                break;
            }
            lexer.sign(",")?;
        }
    }
    // Performance directives, such as `.maxntid 128`.
    while !lexer.take("{")? {
        let token = lexer.some("`{`")?;
        if !token.is_word() && token.text != "," {
            let message = format!("expected `{{`, found `{}`", token.text);
            return Err(Error::Syntax { line: token.line, message });
        }
    }
    let first = lexer.peek()?.ok_or_else(|| lexer.error("expected `}`, found the end of the text"))?;
    let (body, line) = (first.start, first.line);
    skip_body(lexer)?;
    Ok(Entry { name, parameters, body, line, kernel: OnceLock::new() })
}

/// Skips a body, from after its opening brace to after its closing brace.
fn skip_body(lexer: &mut Lexer) -> Result<()> {
    let mut depth = 1;
    while depth > 0 {
        match lexer.some("`}`")?.text {
            "{" => depth += 1,
            "}" => depth -= 1,
            _ => {}
        }
    }
    Ok(())
}

/// Skips a function or its declaration, after `.func`.
fn skip_function(lexer: &mut Lexer) -> Result<()> {
    loop {
        match lexer.some("`{` or `;`")?.text {
            "{" => return skip_body(lexer),
            ";" => return Ok(()),
            _ => {}
        }
    }
}

/// Parses `.param .u64 .ptr .global .align 1 name` or `.param .align 8 .b8 name[48]` (ISA 5.1.6).
fn parameter(lexer: &mut Lexer, before: &[Parameter]) -> Result<Parameter> {
    lexer.sign(".param")?;
    let aligned = lexer.take(".align")?;
    let align = if aligned { Some(parse::size(lexer)?) } else { None };
    let ty = lexer.word("a type")?;
    let element = parse::type_bytes(ty)?;
    // Attributes of a pointer describe its target.
    if lexer.take(".ptr")? {
        let _ = lexer.take(".global")?;
        if lexer.take(".align")? {
            parse::size(lexer)?;
        }
    }
    let name = lexer.word("a parameter's name")?.text.to_owned();
    let mut size = element as usize;
    if lexer.take("[")? {
        size *= parse::size(lexer)? as usize;
        lexer.sign("]")?;
    }
    let align = align.unwrap_or(element).max(1) as usize;
    let end = before.last().map_or(0, |last| last.offset + last.size);
    Ok(Parameter { name, size, align, offset: end.next_multiple_of(align) })
}

impl Kernel {
    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns its parameters, in order.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Returns the distinct opcodes that it uses, such as `fma.rn.f32`, sorted.
    pub fn instructions(&self) -> Vec<&str> {
        let mut opcodes: Vec<&str> =
            self.program.places.iter().map(|place| place.opcode(&self.text)).collect();
        opcodes.sort_unstable();
        opcodes.dedup();
        opcodes.retain(|opcode| !opcode.is_empty());
        opcodes
    }

    /// Returns the number of static instructions, the index range of [`crate::Coverage`].
    pub fn len(&self) -> usize {
        self.program.code.len()
    }

    /// Returns whether it has no instructions.
    pub fn is_empty(&self) -> bool {
        self.program.code.is_empty()
    }

    /// Returns a static instruction's line in the PTX and its text.
    pub fn instruction(&self, index: usize) -> (u32, &str) {
        let place = &self.program.places[index];
        (place.line, place.text(&self.text))
    }
}

// Tests run a module's kernels on several threads.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<Module>();
    shared::<Kernel>();
};
