//! The formats: a block's scale from its amax, and encoding and decoding of chunks.
//!
//! The reference is `microscale_formats`. [`Format::define`] and [`Format::code`] apply it
//! directly. [`Format::scale`] and [`Format::encode`] give the same bytes faster, for blocks that
//! are [in range](Scaled::in_range).

mod blocks;
mod decode;
mod element;
mod encode;
mod mx;
mod nv;
mod searched;

pub(crate) use blocks::Blocks;
pub(crate) use decode::{Decode, NvDecoder};
pub(crate) use element::Element;
pub(crate) use encode::{Factor, Format};
pub(crate) use mx::{ANY, EVEN, Mx, OTHER};
pub(crate) use nv::{Nv, uses_shortcut};
pub(crate) use searched::{Plain, Searched};
