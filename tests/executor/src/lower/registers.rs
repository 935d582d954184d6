//! Declared registers and constants, their scopes, and their slots.

use std::collections::{HashMap, HashSet};

use crate::parse::{Kind, Names, Statement};
use crate::program::{File, Program, Slot, Special};

/// A declared register.
#[derive(Clone, Copy, Debug)]
pub(super) struct Declared {
    pub(super) file: Which,
    pub(super) slot: Slot,
    /// 8, 16, 32 or 64, and 1 for predicates.
    pub(super) bits: u32,
}

/// The file that holds a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
    Word,
    Long,
    Predicate,
}

/// Names in scope, and allocated slots.
#[derive(Default)]
pub(super) struct Registers<'a> {
    scopes: Vec<Scope<'a>>,
    words: Slots<u32>,
    longs: Slots<u64>,
    predicates: Slots<bool>,
    specials: HashMap<Special, Slot>,
    long_specials: HashMap<Special, Slot>,
}

#[derive(Default)]
struct Scope<'a> {
    names: HashMap<&'a str, Declared>,
    /// `prefix<count>`, with the first slot.
    ranges: Vec<(&'a str, u32, Declared)>,
    /// Registers written so far, in a scope of straight-line code.
    ///
    /// Such a scope's slots are reused, and the value of an earlier scope must not count as
    /// written. In straight-line code, a read before the write is visible in the text.
    written: Option<HashSet<&'a str>>,
}

/// Slots of one file.
struct Slots<T> {
    file: File<T>,
    free: Vec<Slot>,
    constants: HashMap<T, Slot>,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self { file: File::default(), free: Vec::new(), constants: HashMap::new() }
    }
}

type Message = String;

impl<T: Copy + Eq + std::hash::Hash> Slots<T> {
    fn next(&mut self, name: &str) -> Result<Slot, Message> {
        let slot = Slot::try_from(self.file.names.len()).ok().filter(|&slot| slot != Slot::MAX);
        self.file.names.push(name.into());
        slot.ok_or_else(|| "the kernel has too many registers".into())
    }

    fn constant(&mut self, value: T) -> Result<Slot, Message> {
        if let Some(&slot) = self.constants.get(&value) {
            return Ok(slot);
        }
        let slot = self.next("")?;
        self.constants.insert(value, slot);
        self.file.constants.push((slot, value));
        Ok(slot)
    }
}

impl<'a> Registers<'a> {
    /// Opens a scope. `rest` are the statements after the opening brace.
    pub(super) fn open(&mut self, rest: &[Statement]) {
        let mut depth = 0;
        let mut straight = true;
        for statement in rest {
            match &statement.kind {
                Kind::Open => depth += 1,
                Kind::Close if depth == 0 => break,
                Kind::Close => depth -= 1,
                Kind::Label(_) | Kind::Targets(..) => straight = false,
                Kind::Instruction(instruction) => {
                    straight &= instruction.guard.is_none() && !instruction.opcode.starts_with("br");
                }
                _ => {}
            }
        }
        self.scopes.push(Scope { written: straight.then(HashSet::new), ..Scope::default() });
    }

    /// Closes the innermost scope.
    pub(super) fn close(&mut self) {
        let Some(scope) = self.scopes.pop() else { return };
        if scope.written.is_none() {
            return;
        }
        for register in scope.names.values() {
            match register.file {
                Which::Word => self.words.free.push(register.slot),
                Which::Long => self.longs.free.push(register.slot),
                Which::Predicate => self.predicates.free.push(register.slot),
            }
        }
    }

    /// `.reg .type names;` in the innermost scope.
    pub(super) fn declare(&mut self, ty: &str, names: &[Names<'a>]) -> Result<(), Message> {
        let (file, bits) = match ty {
            ".pred" => (Which::Predicate, 1),
            ".b8" | ".u8" | ".s8" => (Which::Word, 8),
            ".b16" | ".u16" | ".s16" | ".f16" | ".bf16" => (Which::Word, 16),
            ".b32" | ".u32" | ".s32" | ".f32" | ".f16x2" | ".bf16x2" => (Which::Word, 32),
            ".b64" | ".u64" | ".s64" | ".f64" => (Which::Long, 64),
            _ => return Err(format!("registers of type {ty} are not supported")),
        };
        if self.scopes.is_empty() {
            self.scopes.push(Scope::default());
        }
        for &name in names {
            match name {
                Names::One(name) => {
                    let slot = self.slot(file, name)?;
                    let declared = Declared { file, slot, bits };
                    if self.scopes.last_mut().expect("pushed").names.insert(name, declared).is_some() {
                        return Err(format!("{name} is declared twice"));
                    }
                }
                Names::Range(prefix, count) => {
                    let mut first = None;
                    for i in 0..count {
                        let slot = self.fresh(file, &format!("{prefix}{i}"))?;
                        first.get_or_insert(slot);
                    }
                    let declared = Declared { file, slot: first.unwrap_or(0), bits };
                    self.scopes.last_mut().expect("pushed").ranges.push((prefix, count, declared));
                }
            }
        }
        Ok(())
    }

    fn fresh(&mut self, file: Which, name: &str) -> Result<Slot, Message> {
        match file {
            Which::Word => self.words.next(name),
            Which::Long => self.longs.next(name),
            Which::Predicate => self.predicates.next(name),
        }
    }

    /// Returns a slot, which is reused if the scope allows it.
    fn slot(&mut self, file: Which, name: &str) -> Result<Slot, Message> {
        let again = self.scopes.last().is_some_and(|scope| scope.written.is_some());
        let free = match file {
            Which::Word => &mut self.words.free,
            Which::Long => &mut self.longs.free,
            Which::Predicate => &mut self.predicates.free,
        };
        let reused = if again { free.pop() } else { None };
        match reused {
            Some(slot) => Ok(slot),
            None => self.fresh(file, name),
        }
    }

    /// Returns the register of the innermost scope that declares `name`.
    pub(super) fn find(&mut self, name: &'a str, writes: bool) -> Result<Option<Declared>, Message> {
        for scope in self.scopes.iter_mut().rev() {
            if let Some(&declared) = scope.names.get(name) {
                if let Some(written) = &mut scope.written {
                    if writes {
                        written.insert(name);
                    } else if !written.contains(name) {
                        return Err(format!("{name} is read before it is written"));
                    }
                }
                return Ok(Some(declared));
            }
            for &(prefix, count, first) in &scope.ranges {
                let number =
                    name.strip_prefix(prefix).filter(|number| *number == "0" || !number.starts_with('0'));
                let number = number.and_then(|number| number.parse::<u32>().ok());
                if let Some(number) = number.filter(|&number| number < count) {
                    return Ok(Some(Declared { slot: first.slot + number as Slot, ..first }));
                }
            }
        }
        Ok(None)
    }

    /// Returns a word that always holds `value`.
    pub(super) fn word(&mut self, value: u32) -> Result<Slot, Message> {
        self.words.constant(value)
    }

    /// Returns a long that always holds `value`.
    pub(super) fn long(&mut self, value: u64) -> Result<Slot, Message> {
        self.longs.constant(value)
    }

    /// Returns a predicate that always holds `value`.
    pub(super) fn predicate(&mut self, value: bool) -> Result<Slot, Message> {
        self.predicates.constant(value)
    }

    /// Returns a word that holds a special register.
    pub(super) fn special(&mut self, special: Special) -> Result<Slot, Message> {
        held(&mut self.specials, &mut self.words, special)
    }

    /// Returns a long that holds a special register.
    pub(super) fn long_special(&mut self, special: Special) -> Result<Slot, Message> {
        held(&mut self.long_specials, &mut self.longs, special)
    }

    /// Moves the files into the program.
    pub(super) fn finish(self: &mut Registers<'a>, program: &mut Program) {
        program.words = std::mem::take(&mut self.words.file);
        program.longs = std::mem::take(&mut self.longs.file);
        program.predicates = std::mem::take(&mut self.predicates.file);
        let all =
            |specials: &HashMap<Special, Slot>| specials.iter().map(|(&of, &slot)| (slot, of)).collect();
        (program.specials, program.long_specials) = (all(&self.specials), all(&self.long_specials));
    }
}

/// Returns the slot that holds a special register, allocating it if necessary.
fn held<T: Copy + Eq + std::hash::Hash>(
    specials: &mut HashMap<Special, Slot>,
    slots: &mut Slots<T>,
    special: Special,
) -> Result<Slot, Message> {
    if let Some(&slot) = specials.get(&special) {
        return Ok(slot);
    }
    let slot = slots.next("")?;
    specials.insert(special, slot);
    Ok(slot)
}
