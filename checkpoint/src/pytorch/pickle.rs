//! An interpreter of the pickle instructions that `torch.save` writes for dictionaries of tensors.
//!
//! An instruction takes at least one byte and makes at most one value. Values refer to others by
//! number and are never copied. So memory is proportional to the pickle, and a dictionary that
//! contains itself does no harm.

use std::collections::HashMap;
use std::ops::Range;

use safetensors::Dtype;

use super::Parsed;
use super::value::{Global, Id, PickleValue, Strided, TorchStorage};
use crate::limits::{PICKLE_BYTES, PICKLE_VALUES, check_dimensions, check_name};

/// The state of the interpreter.
pub(super) struct Pickle<'a> {
    rest: &'a [u8],
    /// The length of the pickle in bytes.
    length: usize,
    values: Vec<PickleValue<'a>>,
    /// The items of all tuples.
    parts: Vec<Id>,
    stack: Vec<Id>,
    /// The stack heights of the open marks.
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
}

impl<'a> Pickle<'a> {
    /// Interprets a pickle to its end. Returns the number of the resulting value.
    pub(super) fn read(bytes: &'a [u8]) -> Parsed<(Self, Id)> {
        if bytes.len() as u64 > PICKLE_BYTES {
            return Err(format!(
                "its pickle has {} bytes, more than the {PICKLE_BYTES} allowed",
                bytes.len()
            ));
        }
        let mut pickle = Self {
            rest: bytes,
            length: bytes.len(),
            values: Vec::new(),
            parts: Vec::new(),
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
        };
        loop {
            let at = pickle.length - pickle.rest.len();
            let [instruction] = pickle.take()?;
            if instruction == b'.' {
                let value = pickle.pop()?;
                return Ok((pickle, value));
            }
            pickle.interpret(instruction).map_err(|why| match why.starts_with("its pickle uses") {
                true => why,
                false => format!("at byte {at} of its pickle: {why}"),
            })?;
        }
    }

    /// The value with a number.
    pub(super) fn value(&self, id: Id) -> &PickleValue<'a> {
        self.values.get(id as usize).unwrap_or(&PickleValue::None)
    }

    fn interpret(&mut self, instruction: u8) -> Parsed<()> {
        match instruction {
            // The protocol, and the length of a frame.
            0x80 => self.take::<1>().map(drop),
            0x95 => self.take::<8>().map(drop),
            b'(' => {
                self.marks.push(self.stack.len());
                self.check_values()
            }
            b'0' => self.pop().map(drop),
            // The memo.
            b'q' => self.take::<1>().and_then(|[key]| self.memoize(key.into())),
            b'r' => self.take().and_then(|key| self.memoize(u32::from_le_bytes(key))),
            0x94 => self.memoize(self.memo.len() as u32),
            b'h' => self.take::<1>().and_then(|[key]| self.recall(key.into())),
            b'j' => self.take().and_then(|key| self.recall(u32::from_le_bytes(key))),
            // Constants.
            b'N' => self.push(PickleValue::None),
            0x88 | 0x89 => self.push(PickleValue::Bool),
            b'G' => self.take::<8>().and_then(|_| self.push(PickleValue::Float)),
            b'K' => self.take::<1>().and_then(|[byte]| self.push(PickleValue::Int(byte.into()))),
            b'M' => {
                self.take().and_then(|bytes| self.push(PickleValue::Int(u16::from_le_bytes(bytes).into())))
            }
            b'J' => {
                self.take().and_then(|bytes| self.push(PickleValue::Int(i32::from_le_bytes(bytes).into())))
            }
            0x8a => self.long(),
            b'X' | b'T' => self.take().and_then(|length| self.text(u32::from_le_bytes(length).into())),
            0x8c | b'U' => self.take::<1>().and_then(|[length]| self.text(length.into())),
            0x8d => self.take().and_then(|length| self.text(u64::from_le_bytes(length))),
            // Containers.
            b')' => self.tuple(&[]),
            b't' => self.marked().and_then(|parts| self.tuple(&parts)),
            0x85..=0x87 => self.last((instruction - 0x84).into()).and_then(|parts| self.tuple(&parts)),
            b']' => self.push(PickleValue::List),
            b'}' => self.push(PickleValue::Dict(Vec::new())),
            // List items are dropped: tensors in lists have no names.
            b'a' => self.pop().and_then(|_| self.top()).map(drop),
            b'e' => self.marked().and_then(|_| self.top()).map(drop),
            b's' => self.last(2).and_then(|pair| self.put(&pair)),
            b'u' => self.marked().and_then(|pairs| self.put(&pairs)),
            // Functions and their calls.
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.push(PickleValue::Global(Global::named(module, name)?))
            }
            0x93 => {
                let [module, name] = self.last(2)?[..] else { return Err(OTHER.into()) };
                let (PickleValue::Text(module), PickleValue::Text(name)) =
                    (self.value(module), self.value(name))
                else {
                    return Err("a name is not a text".into());
                };
                let global = Global::named(module, name)?;
                self.push(PickleValue::Global(global))
            }
            b'Q' => self.storage(),
            b'R' => self.call(),
            b'b' => self.state(),
            other => Err(format!("the instruction {other:#04x} is not one that torch.save uses for tensors")),
        }
    }

    fn take<const N: usize>(&mut self) -> Parsed<[u8; N]> {
        let (bytes, rest) = self.rest.split_first_chunk().ok_or(ENDS)?;
        self.rest = rest;
        Ok(*bytes)
    }

    fn line(&mut self) -> Parsed<&'a str> {
        let length = self.rest.iter().position(|byte| *byte == b'\n').ok_or(ENDS)?;
        let (line, rest) = self.rest.split_at(length);
        self.rest = &rest[1..];
        let line = str::from_utf8(line).map_err(|error| error.to_string())?;
        check_name(line).map(|()| line)
    }

    fn text(&mut self, length: u64) -> Parsed<()> {
        let split = usize::try_from(length).ok().and_then(|length| self.rest.split_at_checked(length));
        let (text, rest) = split.ok_or(ENDS)?;
        self.rest = rest;
        let text = str::from_utf8(text).map_err(|error| error.to_string())?;
        self.push(PickleValue::Text(text))
    }

    /// Reads an integer of up to eight bytes.
    fn long(&mut self) -> Parsed<()> {
        let [length] = self.take()?;
        let (bytes, rest) = self.rest.split_at_checked(length.into()).ok_or(ENDS)?;
        self.rest = rest;
        let sign = if bytes.last().is_some_and(|byte| byte & 0x80 != 0) { 0xFF } else { 0 };
        let mut all = [sign; 8];
        all.get_mut(..bytes.len()).ok_or("an integer has more than 64 bits")?.copy_from_slice(bytes);
        self.push(PickleValue::Int(i64::from_le_bytes(all)))
    }

    fn push(&mut self, value: PickleValue<'a>) -> Parsed<()> {
        let id = Id::try_from(self.values.len()).map_err(|_| "it makes too many values")?;
        self.values.push(value);
        self.stack.push(id);
        self.check_values()
    }

    fn tuple(&mut self, parts: &[Id]) -> Parsed<()> {
        let start = self.parts.len();
        self.parts.extend(parts);
        let [start, end] = [start, self.parts.len()].map(Id::try_from);
        let (start, end) =
            start.and_then(|start| Ok((start, end?))).map_err(|_| "it makes too many values")?;
        self.push(PickleValue::Tuple(start..end))
    }

    /// Checks the number of values, memo entries and open marks against the limit.
    fn check_values(&self) -> Parsed<()> {
        match self.values.len() + self.memo.len() + self.marks.len() <= PICKLE_VALUES {
            true => Ok(()),
            false => Err(format!("it makes more than the {PICKLE_VALUES} values allowed")),
        }
    }

    /// The stack height at the innermost mark, below which nothing may be popped.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Parsed<Id> {
        self.last(1).map(|last| last[0])
    }

    fn last(&mut self, count: usize) -> Parsed<Vec<Id>> {
        let start = self.stack.len().checked_sub(count).filter(|start| *start >= self.floor());
        Ok(self.stack.split_off(start.ok_or(EMPTY)?))
    }

    fn marked(&mut self) -> Parsed<Vec<Id>> {
        let mark = self.marks.pop().ok_or("there is no mark")?;
        Ok(self.stack.split_off(mark))
    }

    fn top(&self) -> Parsed<Id> {
        let above = self.stack.get(self.floor()..).and_then(|above| above.last());
        above.copied().ok_or_else(|| EMPTY.into())
    }

    fn memoize(&mut self, key: u32) -> Parsed<()> {
        let top = self.top()?;
        self.memo.insert(key, top);
        self.check_values()
    }

    fn recall(&mut self, key: u32) -> Parsed<()> {
        let id = *self.memo.get(&key).ok_or("something is used that was not made")?;
        self.stack.push(id);
        Ok(())
    }

    /// Puts pairs of keys and values into the dictionary on top of the stack.
    fn put(&mut self, pairs: &[Id]) -> Parsed<()> {
        let top = self.top()?;
        let (pairs, []) = pairs.as_chunks::<2>() else { return Err("a key has no value".into()) };
        match self.values.get_mut(top as usize) {
            Some(PickleValue::Dict(entries)) => {
                entries.extend(pairs.iter().map(|[key, value]| (*key, *value)))
            }
            _ => return Err("something is put into a value that is not a dictionary".into()),
        }
        Ok(())
    }

    /// Pops the state of an object. Only dictionaries may have one: `_metadata`, which holds no
    /// tensors.
    fn state(&mut self) -> Parsed<()> {
        self.pop()?;
        match self.value(self.top()?) {
            PickleValue::Dict(_) => Ok(()),
            _ => Err("an object with attributes is not a dictionary".into()),
        }
    }

    fn parts(&self, id: Id) -> Parsed<&[Id]> {
        match self.value(id) {
            PickleValue::Tuple(Range { start, end }) => {
                Ok(self.parts.get(*start as usize..*end as usize).unwrap_or_default())
            }
            _ => Err(OTHER.into()),
        }
    }

    /// A nonnegative integer.
    pub(super) fn size(&self, id: Id) -> Parsed<usize> {
        match self.value(id) {
            PickleValue::Int(number) => {
                usize::try_from(*number).map_err(|_| format!("it has the size {number}"))
            }
            _ => Err("one of its sizes is not an integer".into()),
        }
    }

    /// The sizes or strides of a tensor.
    pub(super) fn sizes(&self, id: Id) -> Parsed<Vec<usize>> {
        let sizes = self.parts(id)?;
        check_dimensions(sizes.len())?;
        sizes.iter().map(|size| self.size(*size)).collect()
    }

    /// Pushes the storage that `torch.save` describes by a tuple: tag, class, key, device, element
    /// count.
    fn storage(&mut self) -> Parsed<()> {
        let id = self.pop()?;
        let [word, class, key, _, _] = *self.parts(id)? else { return Err(OTHER.into()) };
        match (self.value(word), self.value(class), self.value(key)) {
            (
                PickleValue::Text("storage"),
                PickleValue::Global(Global::Storage(dtype)),
                PickleValue::Text(key),
            ) => {
                check_name(key)?;
                let storage = TorchStorage { dtype: *dtype, key };
                self.push(PickleValue::Storage(storage))
            }
            _ => Err("it refers to something that is not a storage".into()),
        }
    }

    /// Calls a known function. A tensor's `requires_grad` and hooks do not change its values.
    fn call(&mut self) -> Parsed<()> {
        let [function, arguments] = self.last(2)?[..] else { return Err(OTHER.into()) };
        let PickleValue::Global(function) = *self.value(function) else {
            return Err("it calls something that is not a function".into());
        };
        let value = match (function, self.parts(arguments)?) {
            (Global::OrderedDict, []) => PickleValue::Dict(Vec::new()),
            (Global::Size, [sizes]) => {
                let sizes = *sizes;
                self.parts(sizes)?;
                self.stack.push(sizes);
                return Ok(());
            }
            (Global::Parameter, [tensor, _requires_grad, _hooks]) => {
                let PickleValue::Tensor(_) = self.value(*tensor) else {
                    return Err("a parameter is made of something other than a tensor".into());
                };
                let tensor = *tensor;
                self.stack.push(tensor);
                return Ok(());
            }
            (Global::Tensor, [storage, offset, shape, strides, _requires_grad, _hooks, metadata @ ..])
                if metadata.len() <= 1 =>
            {
                let PickleValue::Storage(TorchStorage { dtype: Some(dtype), key }) = *self.value(*storage)
                else {
                    return Err("a tensor is made of something other than a storage with a dtype".into());
                };
                tensor(dtype, key, [*offset, *shape, *strides], metadata.first())
            }
            (
                Global::TensorOfBytes,
                [storage, offset, shape, strides, _requires_grad, _hooks, dtype, metadata @ ..],
            ) if metadata.len() <= 1 => {
                let (
                    PickleValue::Storage(TorchStorage { key, .. }),
                    PickleValue::Global(Global::Dtype(dtype)),
                ) = (self.value(*storage), self.value(*dtype))
                else {
                    return Err("a tensor is made of something other than a storage and a dtype".into());
                };
                tensor(*dtype, key, [*offset, *shape, *strides], metadata.first())
            }
            (function, _) => {
                return Err(format!("{function:?} is called with other arguments than torch.save gives"));
            }
        };
        self.push(value)
    }
}

fn tensor<'a>(
    dtype: Dtype,
    key: &'a str,
    [offset, shape, strides]: [Id; 3],
    metadata: Option<&Id>,
) -> PickleValue<'a> {
    PickleValue::Tensor(Box::new(Strided { dtype, key, offset, shape, strides, metadata: metadata.copied() }))
}

const ENDS: &str = "it ends too early";
const EMPTY: &str = "it takes more values than it has made";
const OTHER: &str = "it has no tuple where torch.save has one";
