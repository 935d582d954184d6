//! The formats: how a block's scale follows from its amax, and how chunks of its values become codes and come back.
//!
//! The definition is `microscale_formats`', which [`Format::define`] and [`Format::code`] apply as it stands; [`Format::scale`] and
//! [`Format::encode`] give the same bytes faster, for blocks that are [in range](Scaled::in_range).

mod blocks;
mod decode;
mod element;
mod encode;
mod mx;
mod nv;
mod searched;

pub(crate) use blocks::Blocks;
pub(crate) use decode::{Decode, NvDecoder};
pub(crate) use encode::{Factor, Format};
pub(crate) use mx::{EVEN, Mx, OTHER};
pub(crate) use nv::{Nv, uses_shortcut};
pub(crate) use searched::{Plain, Searched};
