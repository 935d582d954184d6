//! ComfyUI's files, which are refused: their NVFP4 has the names, dtypes and, where sizes are multiples of 128 and 64, the shapes of
//! ModelOpt's, and their MXFP8 those of compressed-tensors', with other bytes.
//!
//! Beside each weight that is quantized, `comfy_quant` is a JSON text in U8 that names the format. comfy-kitchen (0.2.40) packs
//! the first of two codes of NVFP4 into the high half of a byte, and stores the block scales of NVFP4 and MXFP8 in the 128×4 swizzle.

use serde_json::Value;

use crate::names::weight::WEIGHT;
use crate::read::checkpoint::Checkpoint;

/// The end of the name of the text about a layer, in the place of [`WEIGHT`].
const SAYS: &str = ".comfy_quant";

/// The format whose codes and scales are what they seem: FP8 with a scale for all.
const PLAIN: &str = "float8_e4m3fn";

/// The reason why a tensor's codes and scales, as other conventions read them, would be the wrong weights.
pub(crate) fn reordered(checkpoint: &Checkpoint, name: &str) -> Option<String> {
    let says = checkpoint.tensor(&format!("{}{SAYS}", name.strip_suffix(WEIGHT)?))?;
    let json: Value = serde_json::from_slice(says.data).unwrap_or_default();
    let format = json.get("format").and_then(Value::as_str).unwrap_or("no format");
    (format != PLAIN).then(|| {
        format!(
            "it is ComfyUI's {format}, as {} says, which has codes and scales in an order that is not understood; quantize the \
             original again",
            says.name
        )
    })
}
