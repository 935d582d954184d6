//! Declarations of a module, and parameters of a kernel.

use crate::parse::Variable;

/// A module-scope variable in shared or global memory.
#[derive(Clone, Debug)]
pub(crate) struct ModuleVariable {
    pub(crate) name: String,
    pub(crate) align: u32,
    pub(crate) size: Option<u32>,
}

impl From<Variable<'_>> for ModuleVariable {
    fn from(variable: Variable<'_>) -> Self {
        Self { name: variable.name.into(), align: variable.align, size: variable.size }
    }
}

/// A kernel's parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Its name in the PTX.
    pub name: String,
    /// Its size in bytes.
    pub size: usize,
    /// Its alignment in bytes.
    pub align: usize,
    /// The offset in the parameter space.
    pub(crate) offset: usize,
}
