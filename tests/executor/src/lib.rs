//! Executes PTX on the CPU to test kernels without a GPU. For tests only.
//!
//! Parse a [`Module`] from PTX text, then run one [`Kernel`] of it on a grid with [`Kernel::run`],
//! over the buffers of a [`Memory`]. The result is either the one that NVIDIA documents (PTX ISA
//! 8.8), or a [`Fault`] that names the instruction and the thread. Faults are accesses out of
//! bounds, misaligned accesses, reads of unwritten bytes, races and deadlocks. An unimplemented
//! instruction is an [`Error`] when a kernel is lowered. The executor never guesses, and it ignores
//! nothing that could change a value.
//!
//! - `lex`, `parse` and `module` turn text into statements. `lower` turns statements into a
//!   `program`, once per kernel. `semantics` holds the lane-wise results of instructions. `run`
//!   executes grids, warps and instructions of several lanes. `memory` and `tensor` hold
//!   bytes and words, `race` and `clock` their accesses, and which threads know that an access is
//!   complete. `tensor_map` describes the sources of tensor copies.
//! - The crate has its own parser. `ptx-syntax` 0.5 rejects all four modules that this crate is
//!   for. It also has a separate type for every form of an instruction, which lowering would have
//!   to take apart again.
//! - Divergent threads of a warp are scheduled independently, as on Volta and newer GPUs. A
//!   [`Schedule`] decides which of them runs first, and results must not depend on it.
//!
//! ```
//! use microscale_executor::{Launch, Memory, Module};
//!
//! let module = Module::parse(
//!     ".version 8.0 .target sm_90 .address_size 64
//!     .visible .entry double(.param .u64 data) {
//!         .reg .b32 %r<3>; .reg .b64 %rd<4>;
//!         ld.param.u64 %rd1, [data];
//!         mov.u32 %r1, %tid.x;
//!         mul.wide.u32 %rd2, %r1, 4;
//!         add.s64 %rd3, %rd1, %rd2;
//!         ld.global.b32 %r2, [%rd3];
//!         add.s32 %r2, %r2, %r2;
//!         st.global.b32 [%rd3], %r2;
//!         ret;
//!     }",
//! )?;
//! let mut memory = Memory::new();
//! let data = memory.allocate_from("data", &[1, 0, 0, 0, 7, 0, 0, 0]);
//! module.kernel("double")?.run(&mut memory, &Launch::new(1, 2), &[data.into()])?;
//! assert_eq!(memory.bytes(data)?, [2, 0, 0, 0, 14, 0, 0, 0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod approximation;
mod clock;
mod declared;
mod error;
mod fault;
mod lanes;
mod launch;
mod lex;
mod lower;
mod memory;
mod module;
mod parse;
mod program;
mod race;
mod run;
mod semantics;
mod tensor;
mod tensor_map;

pub use approximation::Approximation;
pub use declared::Parameter;
pub use error::Error;
pub use fault::{Access, Fault, FaultKind, Space};
pub use launch::{Argument, Coverage, Launch, Schedule, Statistics};
pub use memory::{Buffer, Memory};
pub use module::{Kernel, Module};
pub use tensor_map::{Swizzle, TensorMap};
