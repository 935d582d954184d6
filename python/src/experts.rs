//! Products with the weights of experts: Python's `microscale.Experts`.

use half::{bf16, f16};
use microscale::formats::nvfp4::Direction;
use microscale::{Activation, ExpertRows, Format, GlobalScale, QuantizedShape, QuantizedView};
use pyo3::intern;
use pyo3::prelude::*;

use crate::array::{Array, Kind};
use crate::errors::{error, of_tensors};
use crate::gate::{combine, gate_of, results};
use crate::inputs::Activations;
use crate::interface::array_of;
use crate::recipe::word;
use crate::rounding::Rounding;
use crate::tensors::{add_bias, require_bias, require_elements};
use crate::workers::work;

/// The parts of an `Experts`: codes and scales of all, and the shape of one's weights.
pub(crate) struct Experts {
    pub(crate) codes: Array,
    pub(crate) scales: Array,
    pub(crate) shape: QuantizedShape,
    pub(crate) count: usize,
}

impl Experts {
    /// Takes them from the object, by a function that finds arrays.
    pub(crate) fn by(
        object: &Bound<'_, PyAny>,
        array_of: impl Fn(&Bound<'_, PyAny>, &'static str) -> PyResult<Array>,
    ) -> PyResult<Self> {
        let py = object.py();
        let format: Format = word(py, object.getattr(intern!(py, "format"))?.extract()?)?;
        let (count, rows, cols): (usize, usize, usize) = object.getattr(intern!(py, "shape"))?.extract()?;
        let codes = array_of(&object.getattr(intern!(py, "codes"))?, "codes")?;
        let scales = array_of(&object.getattr(intern!(py, "scales"))?, "scales")?;
        Ok(Self { codes, scales, shape: QuantizedShape::new(format, rows, cols), count })
    }

    /// The weights of each, under the global scales of the object, which are numbers.
    fn views(&self, object: &Bound<'_, PyAny>) -> PyResult<Vec<QuantizedView<'_>>> {
        let py = object.py();
        let of_tensors = |why| of_tensors(py, why);
        let (codes, scales) = (self.codes.bytes(py)?, self.scales.bytes(py)?);
        let (of_codes, of_scales) = self.shape.bytes().map_err(of_tensors)?;
        for (name, found, one) in [("codes", codes.len(), of_codes), ("scales", scales.len(), of_scales)] {
            let expected = one.saturating_mul(self.count);
            if found != expected {
                let count = self.count;
                return Err(error(py, format!("{name} have {found} bytes and {count} experts {expected}")));
            }
        }
        let numbers: Option<Vec<f64>> = object.getattr(intern!(py, "_numbers"))?.extract()?;
        if let Some(numbers) = &numbers
            && numbers.len() != self.count
        {
            let (found, count) = (numbers.len(), self.count);
            return Err(error(
                py,
                format!("there are {found} global scales of {count} experts; pass one for each"),
            ));
        }
        let global = numbers.map(|numbers| -> PyResult<_> {
            let direction: Direction = word(py, object.getattr(intern!(py, "direction"))?.extract()?)?;
            Ok((direction, numbers))
        });
        let global = global.transpose()?;
        let view = |expert: usize| {
            let view = QuantizedView::from_parts(
                self.shape,
                &codes[expert * of_codes..][..of_codes],
                &scales[expert * of_scales..][..of_scales],
            )?;
            match &global {
                None => Ok(view),
                Some((direction, numbers)) => {
                    view.with_global_scale(GlobalScale::of(*direction, numbers[expert] as f32))
                }
            }
        };
        (0..self.count).map(|expert| view(expert).map_err(of_tensors)).collect()
    }
}

/// The order of rows of activations `[tokens, K]` or, of a row a pair, `[tokens, top_k, K]`, and
/// the pairs of a token.
pub(crate) fn rows_of(
    py: Python<'_>,
    activations: &Activations,
    chosen: &Array,
    cols: usize,
) -> PyResult<(ExpertRows, usize)> {
    if let Activations::Values(values) = activations {
        values.require(py, values.kind())?;
    }
    let &[tokens, top_k] = chosen.dims() else {
        let found = chosen.dims();
        return Err(error(
            py,
            format!("experts have shape {found:?}; pass [tokens, k], the experts of each token"),
        ));
    };
    match *activations.dims() {
        [rows, found] if rows == tokens && found == cols => Ok((ExpertRows::Indexed, top_k)),
        [rows, each, found] if rows == tokens && each == top_k && found == cols => {
            Ok((ExpertRows::Paired, top_k))
        }
        ref found => Err(error(
            py,
            format!(
                "activations have shape {found:?} and must have [{tokens}, {cols}] or, a row for each expert of a token, \
                 [{tokens}, {top_k}, {cols}]"
            ),
        )),
    }
}

/// Adds an expert's bias to the results of its pairs, with a rounding of its own.
fn add_biases<R: Activation, T: Activation>(out: &mut [R], bias: &[T], chosen: &[u32], rows: usize) {
    for (results, expert) in out.chunks_exact_mut(rows.max(1)).zip(chosen) {
        let Some(bias) = bias.chunks_exact(rows.max(1)).nth(*expert as usize) else { continue };
        add_bias(results, bias);
    }
}

/// Multiplies rows of activations, which it may round first, with the weights of their experts, and
/// adds the experts' biases.
#[pyfunction]
#[pyo3(signature = (weights, x, chosen, out, bias, activations, round_weights, gate))]
#[expect(clippy::too_many_arguments, reason = "inputs and outputs of one call in Python")]
pub(crate) fn linear_experts(
    py: Python<'_>,
    weights: &Bound<'_, PyAny>,
    x: &Bound<'_, PyAny>,
    chosen: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    bias: Option<&Bound<'_, PyAny>>,
    activations: Option<&str>,
    round_weights: bool,
    gate: Option<&str>,
) -> PyResult<()> {
    let rounding = Rounding::of(py, activations, round_weights)?;
    let experts = Experts::by(weights, array_of)?;
    let views = experts.views(weights)?;
    let (activations, chosen) = (Activations::by(x, array_of)?, array_of(chosen, "experts")?);
    activations.require(py, rounding)?;
    let bias = bias.map(|bias| array_of(bias, "bias")).transpose()?;
    let (rows, top_k) = rows_of(py, &activations, &chosen, experts.shape.cols)?;
    let chosen_experts = chosen.indices(py)?;
    let mut out = array_of(out, "out")?;
    let gate = gate_of(py, gate)?;
    require_elements(py, &out, chosen_experts.len(), results(py, experts.shape.rows, gate)?)?;
    let kind = activations.kind(out.kind());
    if let Some(bias) = &bias {
        require_bias(py, bias, kind, &[experts.count, experts.shape.rows])?;
    }
    let inputs = [&experts.codes, &experts.scales, &chosen].into_iter();
    let inputs: Vec<_> = inputs.chain(activations.arrays()).chain(&bias).collect();
    /// The product for a dtype.
    macro_rules! multiply {
        ($T:ty) => {{
            let out: &mut [$T] = out.output(py, kind, &inputs)?;
            let bias = bias.as_ref().map(Array::values::<$T>);
            let input = activations.input::<$T>(py, rounding, round_weights)?;
            work(py, || {
                let of_pair = experts.shape.rows;
                let Some(gate) = gate else {
                    input.multiply_experts(views, chosen_experts, top_k, rows, out)?;
                    if let Some(bias) = bias {
                        add_biases(out, bias, chosen_experts, of_pair);
                    }
                    return Ok(());
                };
                let mut sums = vec![0f32; chosen_experts.len() * of_pair];
                input.widened().multiply_experts(views, chosen_experts, top_k, rows, &mut sums)?;
                if let Some(bias) = bias {
                    add_biases(&mut sums, bias, chosen_experts, of_pair);
                }
                let pairs = sums.chunks_exact(of_pair.max(1)).zip(out.chunks_exact_mut((of_pair / 2).max(1)));
                for ((sums, out), expert) in pairs.zip(chosen_experts) {
                    if (*expert as usize) < experts.count {
                        combine(gate, sums, out);
                    }
                }
                Ok(())
            })?
        }};
    }
    let done = match kind {
        Kind::F32 => multiply!(f32),
        Kind::F16 => multiply!(f16),
        Kind::Bf16 => multiply!(bf16),
        Kind::Bytes | Kind::Indices | Kind::Longs => return Err(activations.no_values(&out)),
    };
    done.map_err(|error| of_tensors(py, error))
}

#[cfg(feature = "cuda")]
pub(crate) use on_gpu::{
    gpu_experts_rounded_workspace_bytes, gpu_experts_workspace_bytes, gpu_linear_experts,
};

/// On GPUs: the sorting of pairs, followed by their product, in one workspace.
#[cfg(feature = "cuda")]
mod on_gpu {
    use std::sync::Arc;

    use microscale::Dtype;
    use microscale::gpu::cudarc::driver::CudaStream;
    use microscale::gpu::{
        DeviceEpilogue, DeviceExpertsView, DeviceRoutingMut, DeviceView, DeviceViewMut, Fp8Activations,
        GemmWorkspaceMut,
    };

    use super::*;
    use crate::gpu::{Work, bytes, view, view_mut, words};
    use crate::gpu_tensors::{dtype_of, no_wide_bias};
    use crate::inputs::DeviceInput;
    use crate::interface::array_anywhere;

    impl Experts {
        /// The weights in the memory of a GPU, under global scales that are there, a slot for each.
        fn device_view<'a>(
            &'a self,
            py: Python<'_>,
            slots: Option<&'a (Direction, Array)>,
        ) -> PyResult<DeviceExpertsView<'a>> {
            let of_tensors = |why| of_tensors(py, why);
            let (codes, scales) = (bytes(py, &self.codes)?, bytes(py, &self.scales)?);
            let all =
                DeviceExpertsView::from_parts(self.shape, self.count, codes, scales).map_err(of_tensors)?;
            match slots {
                None => Ok(all),
                Some((direction, slots)) => {
                    slots.require(py, Kind::F32)?;
                    all.with_global_slots(*direction, words(slots)).map_err(of_tensors)
                }
            }
        }
    }

    /// The activations of a product that decide the size of its workspace.
    #[derive(Clone, Copy)]
    enum Rounded {
        Of(Dtype),
        Fp4 { per_token: bool },
        Fp8,
    }

    /// The offset of the routing in a workspace, after the part of the product, and the size of the
    /// workspace.
    fn layout(
        work: &Work,
        experts: DeviceExpertsView<'_>,
        pairs: usize,
        activations: Rounded,
    ) -> microscale::Result<(usize, usize)> {
        let routing = match activations {
            Rounded::Of(dtype) => work.gpu.experts_workspace_bytes(experts, pairs, dtype)?,
            Rounded::Fp4 { per_token } => work.gpu.experts_fp4_workspace_bytes(experts, pairs, per_token)?,
            Rounded::Fp8 => work.gpu.experts_fp8_workspace_bytes(experts, pairs)?,
        };
        let routing = routing.next_multiple_of(size_of::<u32>());
        let words = DeviceRoutingMut::words(experts.count(), pairs);
        Ok((routing, routing.saturating_add(words.saturating_mul(size_of::<u32>()))))
    }

    /// The slots of an object's global scales.
    fn slots_of(object: &Bound<'_, PyAny>, stream: usize) -> PyResult<Option<(Direction, Array)>> {
        let py = object.py();
        let slots = object.getattr(intern!(py, "_numbers"))?;
        if slots.is_none() {
            return Ok(None);
        }
        let direction: Direction = word(py, object.getattr(intern!(py, "direction"))?.extract()?)?;
        Ok(Some((direction, array_anywhere(&slots, "global_scales", Some(stream))?)))
    }

    /// Bytes of the workspace that [`gpu_linear_experts`] needs for `pairs` pairs of a token and an
    /// expert, with `wide` activations in f32.
    #[pyfunction]
    pub(crate) fn gpu_experts_workspace_bytes(
        py: Python<'_>,
        weights: &Bound<'_, PyAny>,
        pairs: usize,
        wide: bool,
        stream: usize,
    ) -> PyResult<usize> {
        workspace_bytes(py, weights, pairs, Rounded::Of(dtype_of(wide)), stream)
    }

    /// Bytes of the workspace that [`gpu_linear_experts`] needs for `pairs` pairs of a token and an
    /// expert, with activations in `fp8`, or in the format of the weights: `fp4`, or `fp4_token`
    /// with a global scale per row.
    #[pyfunction]
    pub(crate) fn gpu_experts_rounded_workspace_bytes(
        py: Python<'_>,
        weights: &Bound<'_, PyAny>,
        pairs: usize,
        rounded: &str,
        stream: usize,
    ) -> PyResult<usize> {
        let rounded = match rounded {
            "fp8" => Rounded::Fp8,
            _ => Rounded::Fp4 { per_token: rounded == "fp4_token" },
        };
        workspace_bytes(py, weights, pairs, rounded, stream)
    }

    fn workspace_bytes(
        py: Python<'_>,
        weights: &Bound<'_, PyAny>,
        pairs: usize,
        activations: Rounded,
        stream: usize,
    ) -> PyResult<usize> {
        let experts = Experts::by(weights, |part, what| array_anywhere(part, what, Some(stream)))?;
        let work = Work::with(py, &[&experts.codes, &experts.scales], stream)?;
        let found = layout(&work, experts.device_view(py, None)?, pairs, activations);
        found.map(|(_, bytes)| bytes).map_err(|why| of_tensors(py, why))
    }

    /// Sorts the pairs of tokens and experts by expert, multiplies rows of activations with the
    /// weights of their experts, and adds the experts' biases before the only rounding.
    /// The workspace begins with counters, which are zeros.
    #[pyfunction]
    #[pyo3(signature = (weights, x, chosen, out, bias, workspace, activations, round_weights, gate, stream))]
    #[expect(clippy::too_many_arguments, reason = "inputs and outputs of one call in Python")]
    pub(crate) fn gpu_linear_experts(
        py: Python<'_>,
        weights: &Bound<'_, PyAny>,
        x: &Bound<'_, PyAny>,
        chosen: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        bias: Option<&Bound<'_, PyAny>>,
        workspace: &Bound<'_, PyAny>,
        activations: Option<&str>,
        round_weights: bool,
        gate: Option<&str>,
        stream: usize,
    ) -> PyResult<()> {
        let rounding = Rounding::of(py, activations, round_weights)?;
        let fp8 = rounding.on_gpu(py)?;
        let there = |object: &Bound<'_, PyAny>, what| array_anywhere(object, what, Some(stream));
        let experts = Experts::by(weights, there)?;
        let slots = slots_of(weights, stream)?;
        let (activations, chosen) = (Activations::by(x, there)?, there(chosen, "experts")?);
        activations.require(py, rounding)?;
        let bias = bias.map(|bias| there(bias, "bias")).transpose()?;
        let (mut out, workspace) = (there(out, "out")?, there(workspace, "workspace")?);
        let (rows, top_k) = rows_of(py, &activations, &chosen, experts.shape.cols)?;
        chosen.require(py, Kind::Indices)?;
        let pairs = chosen.span();
        let gate = gate_of(py, gate)?;
        require_elements(py, &out, pairs, results(py, experts.shape.rows, gate)?)?;
        let kind = activations.kind(out.kind());
        if let Some(bias) = &bias {
            require_bias(py, bias, kind, &[experts.count, experts.shape.rows])?;
        }
        let inputs: Vec<_> = [&experts.codes, &experts.scales, &chosen]
            .into_iter()
            .chain(activations.arrays())
            .chain(&bias)
            .chain(slots.as_ref().map(|(_, slots)| slots))
            .collect();
        out.require_output(py, kind, &inputs)?;
        let operands: Vec<_> = inputs.iter().copied().chain([&out]).collect();
        workspace.require_output(py, Kind::Bytes, &operands)?;
        let all: Vec<_> = operands.iter().copied().chain([&workspace]).collect();
        let work = Work::with(py, &all, stream)?;
        if pairs == 0 {
            return Ok(());
        }
        let of_experts = experts.device_view(py, slots.as_ref())?;
        let of_layout = match (&activations, fp8) {
            (Activations::Quantized(..), _) => Rounded::Fp4 { per_token: activations.is_per_token() },
            (Activations::Fp8(_), _) | (Activations::Values(_), Some(_)) => Rounded::Fp8,
            (Activations::Values(_), None) => Rounded::Of(dtype_of(kind == Kind::F32)),
        };
        let layout = layout(&work, of_experts, pairs, of_layout);
        let (of_routing, needed) = layout.map_err(|why| of_tensors(py, why))?;
        let found = workspace.span();
        if found < needed || !workspace.address().is_multiple_of(size_of::<u32>() as u64) {
            return Err(error(py, format!("the workspace has {found} bytes and {needed} are needed")));
        }
        // SAFETY: the workspace has `needed` bytes, which share no memory with the operands. The
        // caller guarantees that its semaphores are zeros. Products use it one after the other, in
        // the order of the stream.
        let space = unsafe { GemmWorkspaceMut::from_raw_parts(workspace.address(), of_routing) };
        let mut space = space.map_err(|why| of_tensors(py, why))?;
        let lists = workspace.address() + of_routing as u64;
        // SAFETY: `chosen` holds 32-bit integers, for which all bits are valid. Its memory outlives
        // the view, as for `view`.
        let pairs_of: DeviceView<'_, u32> = unsafe { DeviceView::from_raw_parts(chosen.address(), pairs) };
        let count = experts.count;
        // SAFETY: the words follow the product's part of the workspace, and pairs are sorted before
        // each product.
        let routing_on = |stream: &Arc<CudaStream>| unsafe {
            DeviceRoutingMut::from_raw_parts(stream, count, pairs, lists)
        };
        let per_token = activations.is_per_token();
        if let Some(x) = activations.on_gpu(py, round_weights)? {
            /// The product for a dtype of biases and one of results.
            macro_rules! multiply {
                ($T:ty, $O:ty) => {{
                    let bias = bias.as_ref().map(view::<$T>);
                    let mut to: DeviceViewMut<'_, $O> = view_mut(&mut out);
                    work.enqueue(py, |gpu, stream| {
                        let mut routing = routing_on(stream);
                        gpu.route_on(stream, pairs_of, top_k, &mut routing)?;
                        let steps = DeviceEpilogue { bias, gate, ..DeviceEpilogue::default() };
                        let to = to.reborrow();
                        match x {
                            DeviceInput::Fp4(x) => {
                                let linear = gpu.linear_experts_fp4::<$T, $O>(of_experts).epilogue(steps);
                                let linear = if per_token { linear.global_scale_per_token() } else { linear };
                                linear.plan(pairs)?.run(stream, x, &routing, rows, &mut space, to)
                            }
                            DeviceInput::Fp8 { codes, scales, options } => {
                                let linear = gpu.linear_experts_fp8::<$T, $O>(of_experts).epilogue(steps);
                                let x = Fp8Activations::Quantized { codes, scales };
                                let plan = linear.options(options).plan(pairs)?;
                                plan.run(stream, x, &routing, rows, &mut space, to)
                            }
                        }
                    })
                }};
            }
            return match kind {
                Kind::F32 if bias.is_some() => Err(no_wide_bias(py)),
                Kind::F32 => multiply!(bf16, f32),
                Kind::F16 => multiply!(f16, f16),
                Kind::Bf16 => multiply!(bf16, bf16),
                Kind::Bytes | Kind::Indices | Kind::Longs => Err(out.no_values()),
            };
        }
        /// The product for a dtype.
        macro_rules! multiply {
            ($T:ty) => {{
                let Activations::Values(x) = &activations else { unreachable!("returned above") };
                let x = view::<$T>(x);
                let bias = bias.as_ref().map(view::<$T>);
                let mut to: DeviceViewMut<'_, $T> = view_mut(&mut out);
                work.enqueue(py, |gpu, stream| {
                    let mut routing = routing_on(stream);
                    gpu.route_on(stream, pairs_of, top_k, &mut routing)?;
                    let steps = DeviceEpilogue { bias, gate, ..DeviceEpilogue::default() };
                    let Some(options) = fp8 else {
                        let plan = gpu.linear_experts(of_experts).epilogue(steps).plan(pairs)?;
                        return plan.run(stream, x, &routing, rows, &mut space, to.reborrow());
                    };
                    let linear = gpu.linear_experts_fp8(of_experts).epilogue(steps).options(options);
                    let x = Fp8Activations::Values(x);
                    linear.plan(pairs)?.run(stream, x, &routing, rows, &mut space, to.reborrow())
                })
            }};
        }
        match kind {
            Kind::F32 => multiply!(f32),
            Kind::F16 => multiply!(f16),
            Kind::Bf16 => multiply!(bf16),
            Kind::Bytes | Kind::Indices | Kind::Longs => Err(activations.no_values(&out)),
        }
    }
}
