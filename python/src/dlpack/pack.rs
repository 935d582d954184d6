//! The structures of DLPack, and the tensor that is taken out of a capsule.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods};

use crate::errors::type_error;
use crate::kind::Kind;

/// The type of an element.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DataType {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
pub(crate) struct Tensor {
    pub(crate) data: *mut u8,
    pub(crate) device_type: i32,
    pub(crate) device_id: i32,
    pub(crate) ndim: i32,
    pub(crate) dtype: DataType,
    pub(crate) shape: *const i64,
    /// In elements; null if there are no gaps.
    pub(crate) strides: *const i64,
    pub(crate) byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Plain {
    tensor: Tensor,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Plain)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: Tensor,
}

const PLAIN_NAME: &CStr = c"dltensor";
const VERSIONED_NAME: &CStr = c"dltensor_versioned";
/// The names of capsules whose tensors have another owner.
const USED_PLAIN_NAME: &CStr = c"used_dltensor";
const USED_VERSIONED_NAME: &CStr = c"used_dltensor_versioned";

/// A tensor that was taken out of its capsule. Its memory stays until this is dropped.
pub(crate) struct Pack(Managed);

/// The structures that a capsule can hold.
enum Managed {
    Plain(NonNull<Plain>),
    Versioned(NonNull<Versioned>),
}

impl Pack {
    /// Takes the tensor out of a capsule, which other consumers see by its name.
    pub(crate) fn take(capsule: &Bound<'_, PyCapsule>, what: &'static str) -> PyResult<Self> {
        let is_versioned = capsule.is_valid_checked(Some(VERSIONED_NAME));
        let (name, used) = match is_versioned {
            true => (VERSIONED_NAME, USED_VERSIONED_NAME),
            false => (PLAIN_NAME, USED_PLAIN_NAME),
        };
        if !capsule.is_valid_checked(Some(name)) {
            let used = [USED_PLAIN_NAME, USED_VERSIONED_NAME];
            let found = match used.iter().any(|used| capsule.is_valid_checked(Some(used))) {
                true => "a capsule whose tensor was taken already",
                false => "a capsule without a tensor",
            };
            return Err(type_error(format!(
                "{what} has a __dlpack__ that returned {found}; return a new capsule of DLPack from each call"
            )));
        }
        let pointer = capsule.pointer_checked(Some(name))?;
        if is_versioned {
            let versioned = pointer.cast::<Versioned>();
            // SAFETY: a capsule of this name holds this structure, and its destructor deletes it as
            // long as the name stays. The version is at the same place in all versions.
            let (major, minor) = unsafe { ((*versioned.as_ptr()).major, (*versioned.as_ptr()).minor) };
            if major != 1 {
                return Err(type_error(format!(
                    "{what} has DLPack {major}.{minor}, and 1.x is read; pass a numpy array"
                )));
            }
        }
        // SAFETY: the capsule is alive, and the name is static.
        if unsafe { pyo3::ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) } != 0 {
            return Err(PyErr::fetch(capsule.py()));
        }
        Ok(Self(match is_versioned {
            true => Managed::Versioned(pointer.cast()),
            false => Managed::Plain(pointer.cast()),
        }))
    }

    pub(crate) fn tensor(&self) -> &Tensor {
        // SAFETY: the structures belong to `self`, whose drop calls their deleters.
        unsafe {
            match self.0 {
                Managed::Plain(plain) => &(*plain.as_ptr()).tensor,
                Managed::Versioned(versioned) => &(*versioned.as_ptr()).tensor,
            }
        }
    }
}

impl Drop for Pack {
    fn drop(&mut self) {
        // SAFETY: the producer made the structure, `take` left it to `self` only, and a deleter is
        // called once, with its structure. Deleters may be called from any thread.
        unsafe {
            match self.0 {
                Managed::Plain(plain) => {
                    if let Some(deleter) = (*plain.as_ptr()).deleter {
                        deleter(plain.as_ptr());
                    }
                }
                Managed::Versioned(versioned) => {
                    if let Some(deleter) = (*versioned.as_ptr()).deleter {
                        deleter(versioned.as_ptr());
                    }
                }
            }
        }
    }
}

impl DataType {
    /// The kind of an element; `None` for types that are not read.
    pub(crate) fn kind(self) -> Option<Kind> {
        // Codes of DLDataTypeCode: signed integer 0, unsigned integer 1, float 2, bfloat16 4, E4M3
        // 10, E8M0 14, E2M1 17.
        Some(match (self.code, self.bits, self.lanes) {
            (2, 32, 1) => Kind::F32,
            (2, 16, 1) => Kind::F16,
            (4, 16, 1) => Kind::Bf16,
            (0 | 1, 32, 1) => Kind::Indices,
            (0, 64, 1) => Kind::Longs,
            (1 | 10 | 14, 8, 1) | (17, 4, 2) => Kind::Bytes,
            _ => return None,
        })
    }

    /// The name of a type whose kind is known.
    pub(crate) fn name(self, kind: Kind) -> &'static str {
        match self.code {
            10 => "float8_e4m3fn",
            14 => "float8_e8m0fnu",
            17 => "float4_e2m1fn_x2",
            _ => kind.name(),
        }
    }
}
