//! Lowers statements to a [`Program`]: names become slots, opcodes become functions.
//!
//! An opcode is looked up as a whole. Modifiers without an effect on values are listed where they
//! are allowed (`.uni`, `.nc`, cache operators and hints). Any other word that is not part of a
//! known opcode makes the instruction unsupported.

mod asynchronous;
mod control;
mod matrices;
mod memory;
mod operands;
mod registers;
mod tensor;
mod values;

use std::collections::{HashMap, HashSet};

use self::registers::Registers;
use crate::declared::{ModuleVariable, Parameter};
use crate::error::{Error, Result};
use crate::memory::address_of_variable;
use crate::parse::{Instruction, Kind, Operand, Statement};
use crate::program::{
    GlobalPlace, Guard, Op, Place, Program, SharedPlace, Slot, TensorAction, WarpGroupAction,
};

/// Unmapped bytes before each variable in shared memory.
const SHARED_GAP: u32 = 256;

/// The addresses of shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placement {
    /// The address of the first variable, if there are no gaps.
    pub(crate) first: Option<u32>,
    /// The start of shared memory among generic addresses.
    pub(crate) window: u64,
}

impl Default for Placement {
    /// Leaves gaps between variables. No buffer is in the window, so using a generic address of
    /// shared memory as a global one is a fault.
    fn default() -> Self {
        Self { first: None, window: 1 << 32 }
    }
}

/// Lowers a kernel's body.
pub(crate) fn lower(
    text: &str,
    target: &str,
    body: &[Statement],
    parameters: &[Parameter],
    [shared, global]: [&[ModuleVariable]; 2],
    placement: Placement,
) -> Result<Program> {
    let mut lowering = Lowering {
        text,
        target,
        placement,
        registers: Registers::default(),
        program: Program::default(),
        parameters,
        shared: HashMap::new(),
        global: HashMap::new(),
        labels: HashMap::new(),
        scopes: Scopes::default(),
        tables: HashMap::new(),
        line: body.first().map_or(1, |statement| statement.line),
        statement: "",
        words: Vec::new(),
    };
    lowering.program.parameters =
        parameters.last().map_or(0, |last| last.offset + last.size.next_multiple_of(8));
    lowering.place_shared(body, shared)?;
    lowering.place_global(global)?;
    lowering.find_labels(body)?;
    for (index, statement) in body.iter().enumerate() {
        lowering.line = statement.line;
        lowering.statement(statement, &body[index + 1..])?;
    }
    lowering.end();
    lowering.find_shared_words();
    lowering.registers.finish(&mut lowering.program);
    Ok(lowering.program)
}

struct Lowering<'a> {
    text: &'a str,
    /// The module's target, such as `sm_120f`.
    target: &'a str,
    placement: Placement,
    registers: Registers<'a>,
    program: Program,
    parameters: &'a [Parameter],
    /// Addresses of variables in shared memory.
    shared: HashMap<&'a str, u32>,
    /// Addresses of variables in global memory.
    global: HashMap<&'a str, u64>,
    /// The instruction after each label, which its scope holds.
    labels: HashMap<(u32, &'a str), u32>,
    scopes: Scopes,
    tables: HashMap<&'a str, &'a [&'a str]>,
    /// The line of the current statement.
    line: u32,
    statement: &'a str,
    /// The words that the current instruction reads or writes.
    words: Vec<Slot>,
}

/// The open scopes, in braces. Each has a number of its own, and the body has 0.
#[derive(Default)]
struct Scopes {
    open: Vec<u32>,
    last: u32,
}

impl Scopes {
    fn open(&mut self) {
        self.last += 1;
        self.open.push(self.last);
    }

    fn close(&mut self) {
        self.open.pop();
    }

    fn current(&self) -> u32 {
        self.open.last().copied().unwrap_or(0)
    }
}

impl<'a> Lowering<'a> {
    fn invalid(&self, message: impl Into<String>) -> Error {
        Error::Invalid { line: self.line, statement: self.statement.into(), message: message.into() }
    }

    fn unsupported(&self, message: impl Into<String>) -> Error {
        Error::Unsupported { line: self.line, statement: self.statement.into(), message: message.into() }
    }

    fn push(&mut self, guard: Option<Guard>, op: Op, place: Place) {
        let shares = std::mem::take(&mut self.words).into();
        self.program.code.push(crate::program::Instruction { guard, op, shares });
        self.program.places.push(place);
    }

    /// Ends the program. Control that runs past the end exits, as at a `ret`.
    fn end(&mut self) {
        let next = self.program.code.len() as u32;
        let leaves = self.program.code.last().is_some_and(|last| {
            last.guard.is_none() && matches!(last.op, Op::Exit | Op::Trap | Op::Branch { .. })
        });
        if !leaves || self.labels.values().any(|&label| label == next) {
            self.push(None, Op::Exit, Place { line: self.line, start: 0, end: 0, opcode: (0, 0) });
        }
    }

    /// Places variables in shared memory.
    ///
    /// Static variables come one after the other, followed by the dynamic ones, which share one
    /// address (ISA 5.1.7). Each has exactly its declared alignment and no more, with an unmapped
    /// gap before it, unless the placement gives the first address.
    fn place_shared(&mut self, body: &'a [Statement<'a>], module: &'a [ModuleVariable]) -> Result<()> {
        let inner = body.iter().filter_map(|statement| match &statement.kind {
            Kind::Shared(variable) => Some((variable.name, variable.align, variable.size)),
            _ => None,
        });
        let outer = module.iter().map(|variable| (variable.name.as_str(), variable.align, variable.size));
        let all: Vec<_> = outer.chain(inner).collect();
        let mut end = self.placement.first.unwrap_or(0);
        for &(name, align, size) in &all {
            if let Some(size) = size {
                let address = self.place(&mut end, align, size)?;
                self.shared.insert(name, address);
                self.program.shared.push(SharedPlace { name: name.into(), address, size: Some(size) });
            }
        }
        let dynamic = || all.iter().filter(|(_, _, size)| size.is_none());
        if let Some((first, ..)) = dynamic().next() {
            let align = dynamic().map(|&(_, align, _)| align).max();
            let address = self.place(&mut end, align.unwrap_or(1), 0)?;
            self.shared.extend(dynamic().map(|&(name, ..)| (name, address)));
            self.program.shared.push(SharedPlace { name: (*first).into(), address, size: None });
        }
        Ok(())
    }

    /// Places the module's variables in global memory.
    fn place_global(&mut self, variables: &'a [ModuleVariable]) -> Result<()> {
        for (index, ModuleVariable { name, align, size }) in variables.iter().enumerate() {
            let size = size.ok_or_else(|| self.invalid(format!("{name} has no length")))?;
            let address = address_of_variable(index, *align)
                .ok_or_else(|| self.invalid(format!("{name} cannot be aligned to {align} bytes")))?;
            self.global.insert(name, address);
            self.program.global.push(GlobalPlace { name: name.clone(), address, size });
        }
        Ok(())
    }

    /// Returns the address of a variable after `end`, and moves `end` after the variable.
    fn place(&self, end: &mut u32, align: u32, size: u32) -> Result<u32> {
        let align = align.max(1);
        let exact = self.placement.first.is_some();
        let odd = |address: u32| match address / align % 2 {
            0 if !exact => address.checked_add(align),
            _ => Some(address),
        };
        let gap = if exact { 0 } else { SHARED_GAP };
        let start = end.checked_add(gap).and_then(|start| start.checked_next_multiple_of(align));
        let placed = start.and_then(odd).and_then(|start| Some((start, start.checked_add(size)?)));
        let (start, behind) = placed.ok_or_else(|| self.invalid("too much shared memory"))?;
        *end = behind;
        Ok(start)
    }

    /// Keeps for each instruction only the words that asynchronous products and loads also use.
    fn find_shared_words(&mut self) {
        let mut of_products: HashSet<Slot> = HashSet::new();
        for instruction in &self.program.code {
            if let Op::WarpGroup { action: WarpGroupAction::Multiply(of), .. } = &instruction.op {
                of_products.extend(of.d.iter().chain(of.a.registers()).copied());
            }
            if let Op::Tensor { action: TensorAction::Load { to, .. }, .. } = &instruction.op {
                of_products.extend(to);
            }
        }
        for instruction in &mut self.program.code {
            let product = matches!(instruction.op, Op::WarpGroup { .. });
            let shared = instruction.shares.iter().filter(|slot| !product && of_products.contains(slot));
            instruction.shares = shared.copied().collect();
        }
    }

    fn find_labels(&mut self, body: &'a [Statement<'a>]) -> Result<()> {
        let mut next = 0;
        for statement in body {
            self.line = statement.line;
            match &statement.kind {
                Kind::Open => self.scopes.open(),
                Kind::Close => self.scopes.close(),
                Kind::Label(name) if self.labels.insert((self.scopes.current(), name), next).is_some() => {
                    return Err(self.invalid(format!("the label {name} stands twice")));
                }
                Kind::Targets(name, targets) => {
                    self.tables.insert(name, targets);
                }
                Kind::Instruction(_) => next += 1,
                _ => {}
            }
        }
        self.scopes = Scopes::default();
        Ok(())
    }

    fn statement(&mut self, statement: &'a Statement<'a>, rest: &'a [Statement<'a>]) -> Result<()> {
        match &statement.kind {
            Kind::Open => {
                self.scopes.open();
                self.registers.open(rest);
            }
            Kind::Close => {
                self.scopes.close();
                self.registers.close();
            }
            Kind::Registers(ty, names) => {
                self.registers.declare(ty, names).map_err(|message| self.invalid(message))?;
            }
            Kind::Label(_) | Kind::Targets(..) | Kind::Shared(_) => {}
            Kind::Instruction(instruction) => self.instruction(instruction)?,
        }
        Ok(())
    }

    fn instruction(&mut self, instruction: &'a Instruction<'a>) -> Result<()> {
        self.statement = instruction.text;
        let guard = match &instruction.guard {
            None => None,
            Some(guard) => {
                let predicate = self.read_predicate(&Operand::Name(guard.predicate))?.predicate;
                Some(Guard { predicate, negated: guard.negated })
            }
        };
        let parts: Vec<&str> = instruction.opcode.split('.').collect();
        let op = self.operation(&parts, &instruction.operands)?;
        let offset = |part: &str| part.as_ptr() as usize - self.text.as_ptr() as usize;
        let (start, opcode) = (offset(instruction.text), offset(instruction.opcode));
        let place = Place {
            line: self.line,
            start,
            end: start + instruction.text.len(),
            opcode: (opcode, opcode + instruction.opcode.len()),
        };
        self.push(guard, op, place);
        Ok(())
    }

    /// Returns the operation of an opcode with these operands.
    ///
    /// Each family of instructions is tried in turn.
    fn operation(&mut self, opcode: &[&'a str], operands: &'a [Operand<'a>]) -> Result<Op> {
        if let Some(op) = self.control(opcode, operands)? {
            return Ok(op);
        }
        if let Some(op) = self.matrices(opcode, operands)? {
            return Ok(op);
        }
        if let Some(op) = self.asynchronous(opcode, operands)? {
            return Ok(op);
        }
        if let Some(op) = self.tensor(opcode, operands)? {
            return Ok(op);
        }
        if let Some(op) = self.memory(opcode, operands)? {
            return Ok(op);
        }
        if let Some(op) = self.value(opcode, operands)? {
            return Ok(op);
        }
        Err(self.unsupported(format!("`{}` is not among the known opcodes", opcode.join("."))))
    }
}
