//! Executes PTX on the CPU, so that kernels can be tested without a GPU: for tests only.
//!
//! A [`Module`] is read from PTX text, a [`Kernel`] of it is run on a grid with [`Kernel::run`], over buffers
//! of a [`Memory`]. The result is the one that NVIDIA documents (PTX ISA 8.8), or a [`Fault`] that names the
//! instruction and the thread: an access out of bounds, misaligned or to bytes that nobody wrote, a race, a
//! deadlock. An instruction that is not implemented is an [`Error`] when a kernel is lowered; nothing is
//! guessed and nothing ignored that could change a value.
//!
//! - `lex`, `parse`, `module`: text to statements. `lower`: statements to `program`, once a kernel.
//!   `semantics`: the results of instructions, lane by lane. `run`: grids, warps, and instructions for
//!   several lanes. `memory`, `race`, `clock`: bytes, who accessed them, and who knows that it is over.
//! - The parser is our own: `ptx-syntax` 0.5 rejects all four of the modules that this crate is for, and
//!   gives an instruction's every form a type of its own, which lowering would have to take apart again.
//! - Threads of a warp that go different ways are scheduled independently (as from Volta on). A [`Schedule`]
//!   decides which of them goes first, and results must not depend on it.
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

pub use approximation::Approximation;
pub use declared::Parameter;
pub use error::Error;
pub use fault::{Access, Fault, FaultKind, Space};
pub use launch::{Argument, Coverage, Launch, Schedule, Statistics};
pub use memory::{Buffer, Memory};
pub use module::{Kernel, Module};
