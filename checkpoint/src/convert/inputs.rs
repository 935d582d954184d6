//! The scales of layers' inputs in the output.

use microscale::GlobalScale;

use crate::checkpoint_formats::packed::Packed;
use crate::checkpoint_formats::storage::{Storage, StoredGlobal};
use crate::write::outline::Outline;

/// The scale of a layer's inputs as it will be stored: how, and what.
pub(crate) fn input_scale(
    packed: &Packed<'_>,
    storage: &'static Storage,
) -> Option<(Outline, &'static StoredGlobal, GlobalScale)> {
    let ((_, scale), input) = packed.input_scale.zip(storage.input_scale.as_ref())?;
    Some((input.outline(packed.name, &packed.shape)?, input, scale.toward(input.direction)))
}

/// Layers without a scale of their inputs, if other layers have one. The config then says that the
/// inputs of all are quantized.
pub(crate) fn unscaled_inputs<'p, 'a: 'p>(
    packed: impl Iterator<Item = (&'p Packed<'a>, &'static Storage)>,
) -> Vec<String> {
    let has_place = |storage: &Storage| storage.input_scale.is_some() && storage.blocks.is_none();
    let packed = packed.filter(|(_, storage)| has_place(storage));
    let (scaled, unscaled): (Vec<_>, Vec<_>) =
        packed.partition(|(packed, storage)| input_scale(packed, storage).is_some());
    if scaled.is_empty() {
        return Vec::new();
    }
    unscaled.into_iter().map(|(packed, _)| packed.name.into()).collect()
}
