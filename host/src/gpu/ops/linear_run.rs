//! Running a product's plan.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, SyncOnDrop};
use microscale_kernels_abi::experts::{PlanGrid, Sorted};

use crate::element::Dtype;
use crate::error::Result;
#[cfg(doc)]
use crate::error::{Error, OperandFault};
use crate::experts::ExpertRows;
use crate::gemv::{Activation, ProductOf};
use crate::gpu::launch::arguments::{Operands, Routed, Steps, apply_direction};
use crate::gpu::launch::{self, Fp8Operand, Fp8Source, TokenGlobals};
use crate::gpu::memory::activations::DeviceActivations;
use crate::gpu::memory::experts::DeviceRouting;
use crate::gpu::memory::view::DeviceView;
use crate::gpu::memory::workspace::GemmWorkspaceMut;
use crate::gpu::ops::activations::{self, check};
use crate::gpu::ops::linear::{ExpertsPlan, Fp4, Fp8, Linear, Options, Plan, Weights};
use crate::gpu::ops::linear_activations::{Activations, Fp4Activations, Fp8Activations};
use crate::gpu::ops::results::{DeviceResults, QuantizedResults, fault};
use crate::gpu::ops::route::{check_routing, lists};
use crate::gpu::plan::planned::Before;
use crate::shape::Shape;

impl<'a> Weights<'a> {
    /// The addresses of codes and scales, the address of slots of global scales, if there are any,
    /// and guards.
    ///
    /// # Errors
    /// [`Error::Alignment`] and [`Error::OtherContext`].
    fn read(self, stream: &'a CudaStream) -> Result<([u64; 2], Option<u64>, [SyncOnDrop<'a>; 3])> {
        match self {
            Self::One(weights) => {
                let ([codes, scales, slot], read) = weights.read(stream)?;
                Ok(([codes, scales], Some(slot), read))
            }
            Self::Experts(experts) => {
                let ((codes, scales, slots), read) = experts.read(stream)?;
                Ok(([codes, scales], slots, read))
            }
        }
    }
}

impl<T: Activation, O: ProductOf<T>> Plan<'_, T, O> {
    /// Enqueues the kernels and returns. Does not wait, and allocates nothing. The same operands
    /// give the same bits each time, on the same GPU.
    ///
    /// `activations` is `[N, K]` and `out` `[N, M]`, without gaps, or
    /// [`QuantizedResults`](crate::gpu::QuantizedResults) of a plan that quantizes its results, for
    /// all kinds of activations. Tensor cores add the products:
    /// [`microscale_formats::weights`] says how far results may be from the exact sum. Activations
    /// in f32 are not rounded: each is multiplied as three in bf16, whose sum it is, except for
    /// bits below 2^−133.
    ///
    /// Rows that are not a multiple of 32 columns, and MXFP4 scales that leave the activations'
    /// dtype no room for the products, take the reference, more slowly; its last bits are the
    /// CPU's.
    ///
    /// # Errors
    /// [`crate::OperandFault::Workspace`] if there are fewer bytes than [`Self::workspace_bytes`],
    /// [`crate::OperandFault::Results`] for memory of the other kind of results, errors about
    /// lengths and about quantizing, [`crate::Error::Alignment`], [`crate::Error::OtherContext`]
    /// and [`crate::Error::Gpu`].
    pub fn run<'x, 's, 'o>(
        &self,
        stream: &Arc<CudaStream>,
        activations: impl Into<DeviceView<'x, T>>,
        workspace: impl Into<GemmWorkspaceMut<'s>>,
        out: impl Into<DeviceResults<'o, O>>,
    ) -> Result<()> {
        self.enqueue(stream, Activations::Values(activations.into()), None, workspace.into(), out.into())
    }
}

impl<T: Activation, O: ProductOf<T>> Plan<'_, T, O, Fp4> {
    /// Enqueues the kernels and returns. Does not wait, and allocates nothing. The same operands
    /// give the same bits each time, on the same GPU.
    ///
    /// `activations` is `[N, K]` in the format of the weights, with linear or swizzled scales, and
    /// `out` is `[N, M]` or under a gate `[N, M / 2]`, without gaps. Sums are multiplied by a
    /// [factor](microscale_formats::fp4_dot::factor), alpha times both global scales. Activations
    /// have a global scale per token if the plan takes such, and only then.
    ///
    /// With block scales, sums have the bits of [`microscale_formats::fp4_dot`], except where
    /// thread blocks share the K of a tile of results: they add their parts in f32. Otherwise
    /// [`microscale_formats::weights`] says how far results may be from the exact sum.
    ///
    /// # Errors
    /// [`OperandFault::Formats`] and [`OperandFault::Activations`] if activations and weights
    /// differ in format or columns, [`OperandFault::TokenScales`], and the errors of
    /// [`Plan::run`](Plan#method.run) of values.
    pub fn run<'x, 's, 'o>(
        &self,
        stream: &Arc<CudaStream>,
        activations: impl Into<Fp4Activations<'x>>,
        workspace: impl Into<GemmWorkspaceMut<'s>>,
        out: impl Into<DeviceResults<'o, O>>,
    ) -> Result<()> {
        self.enqueue(stream, Activations::Fp4(activations.into()), None, workspace.into(), out.into())
    }
}

impl<T: Activation, O: ProductOf<T>> Plan<'_, T, O, Fp8> {
    /// Enqueues the kernels and returns. Does not wait, and allocates nothing. The same operands
    /// give the same bits each time, on the same GPU.
    ///
    /// `out` is `[N, M]`, or under a gate `[N, M / 2]`, without gaps. Sums have the bits of
    /// [`microscale_formats::fp8_dot`], except where thread blocks share the K of a tile of
    /// results: they add their parts in f32.
    ///
    /// # Errors
    /// [`OperandFault::Workspace`] if there are fewer bytes than [`Self::workspace_bytes`],
    /// [`OperandFault::Limit`] for more columns than are quantized, errors about lengths,
    /// [`Error::Alignment`], [`Error::OtherContext`] and [`Error::Gpu`].
    pub fn run<'s, 'o>(
        &self,
        stream: &Arc<CudaStream>,
        activations: Fp8Activations<'_, T>,
        workspace: impl Into<GemmWorkspaceMut<'s>>,
        out: impl Into<DeviceResults<'o, O>>,
    ) -> Result<()> {
        self.enqueue(stream, Activations::Fp8(activations), None, workspace.into(), out.into())
    }
}

impl<T: Activation, O: ProductOf<T>> ExpertsPlan<'_, T, O> {
    /// Enqueues the kernels and returns. Does not wait, and allocates nothing. The same operands
    /// give the same bits each time, on the same GPU.
    ///
    /// `activations` is `[tokens, K]` or `[pairs, K]`, as `rows` says, and `out` `[pairs, M]`,
    /// without gaps. Results are as far from the exact sums as results of
    /// [`Plan::run`](crate::gpu::Plan::run).
    ///
    /// # Errors
    /// [`OperandFault::Routing`] if the routing is of another number of experts or pairs,
    /// [`OperandFault::Workspace`] if there are fewer bytes than [`Self::workspace_bytes`], errors
    /// about lengths, [`Error::Alignment`], [`Error::OtherContext`] and [`Error::Gpu`].
    pub fn run<'x, 's, 'o>(
        &self,
        stream: &Arc<CudaStream>,
        activations: impl Into<DeviceView<'x, T>>,
        routing: &DeviceRouting,
        rows: ExpertRows,
        workspace: impl Into<GemmWorkspaceMut<'s>>,
        out: impl Into<DeviceResults<'o, O>>,
    ) -> Result<()> {
        let (x, routed) = (Activations::Values(activations.into()), Some((routing, rows)));
        self.enqueue(stream, x, routed, workspace.into(), out.into())
    }
}

impl<T: Activation, O: ProductOf<T>> ExpertsPlan<'_, T, O, Fp4> {
    /// Enqueues the kernels and returns. Does not wait, and allocates nothing. The same operands
    /// give the same bits each time, on the same GPU.
    ///
    /// `activations` is `[tokens, K]` or `[pairs, K]` in the format of the weights, as `rows` says,
    /// and `out` `[pairs, M]`, or under a gate `[pairs, M / 2]`, without gaps. Sums are multiplied
    /// by a [factor](microscale_formats::fp4_dot::factor), alpha times the global scales of the
    /// expert and of its activations. [`Plan::run`](Plan#method.run-1) says how exact
    /// results are.
    ///
    /// # Errors
    /// [`OperandFault::Routing`] if the routing is of another number of experts or pairs,
    /// [`OperandFault::Formats`] and [`OperandFault::Activations`] if activations and weights
    /// differ in format or columns, [`OperandFault::Workspace`] if there are fewer bytes than
    /// [`Self::workspace_bytes`], [`Error::NoGlobalScale`] for slots with MXFP4, errors about
    /// lengths, [`Error::Alignment`], [`Error::OtherContext`] and [`Error::Gpu`].
    pub fn run<'x, 's, 'o>(
        &self,
        stream: &Arc<CudaStream>,
        activations: impl Into<Fp4Activations<'x>>,
        routing: &DeviceRouting,
        rows: ExpertRows,
        workspace: impl Into<GemmWorkspaceMut<'s>>,
        out: impl Into<DeviceResults<'o, O>>,
    ) -> Result<()> {
        let (x, routed) = (Activations::Fp4(activations.into()), Some((routing, rows)));
        self.enqueue(stream, x, routed, workspace.into(), out.into())
    }
}

impl<T: Activation, O: ProductOf<T>> ExpertsPlan<'_, T, O, Fp8> {
    /// Enqueues the kernels and returns. Does not wait, and allocates nothing. The same operands
    /// give the same bits each time, on the same GPU.
    ///
    /// `activations` is `[tokens, K]` or `[pairs, K]`, as `rows` says, and `out` `[pairs, M]`, or
    /// under a gate `[pairs, M / 2]`, without gaps. Sums have the bits of
    /// [`microscale_formats::fp8_dot`], except where thread blocks share the K of a tile of
    /// results: they add their parts in f32.
    ///
    /// # Errors
    /// [`OperandFault::Routing`] if the routing is of another number of experts or pairs,
    /// [`OperandFault::Workspace`] if there are fewer bytes than [`Self::workspace_bytes`],
    /// [`OperandFault::Limit`] for more columns than are quantized, errors about lengths,
    /// [`Error::Alignment`], [`Error::OtherContext`] and [`Error::Gpu`].
    pub fn run<'s, 'o>(
        &self,
        stream: &Arc<CudaStream>,
        activations: Fp8Activations<'_, T>,
        routing: &DeviceRouting,
        rows: ExpertRows,
        workspace: impl Into<GemmWorkspaceMut<'s>>,
        out: impl Into<DeviceResults<'o, O>>,
    ) -> Result<()> {
        let (x, routed) = (Activations::Fp8(activations), Some((routing, rows)));
        self.enqueue(stream, x, routed, workspace.into(), out.into())
    }
}

impl<T: Activation, O: ProductOf<T>, K, W> Plan<'_, T, O, K, W> {
    /// Checks operands and enqueues the kernels. `routed` has the pairs of a product with experts'
    /// weights.
    fn enqueue(
        &self,
        stream: &Arc<CudaStream>,
        activations: Activations<'_, T>,
        routed: Option<(&DeviceRouting, ExpertRows)>,
        mut workspace: GemmWorkspaceMut<'_>,
        out: DeviceResults<'_, O>,
    ) -> Result<()> {
        let Linear { gpu, weights, epilogue, options, quantized_results, .. } = &self.linear;
        let (shape, count, rows, kernels) = (weights.shape(), weights.count(), self.rows, &gpu.kernels);
        let x_rows = match routed {
            None => rows,
            Some((routing, order)) => {
                check_routing(routing, count, rows)?;
                order.activation_rows([rows, routing.top_k])
            }
        };
        let (alpha, token_scales) = match *options {
            Options::Values { .. } => (1.0, 1),
            Options::Fp4 { alpha, per_token, .. } => (alpha, usize::from(per_token)),
            Options::Fp8(options) => (1.0, options.token_scales(shape.cols)),
        };
        activations.check(x_rows, shape, count, token_scales)?;
        let results = epilogue.check(shape.rows, count, rows)?;
        let results = Shape::new(rows, results);
        let (mut values, quantized) = match (out, quantized_results) {
            (DeviceResults::Values(out), None) => {
                results.check("the output", out.len())?;
                (Some(out), None)
            }
            (DeviceResults::Quantized(out), Some(recipe)) => (None, Some((out, recipe))),
            (DeviceResults::Values(_), Some(_)) => {
                return fault(
                    "the plan quantizes its results; pass QuantizedResults, or plan without quantize_results",
                );
            }
            (DeviceResults::Quantized(_), None) => {
                return fault(
                    "the plan does not quantize its results; call quantize_results before plan, or pass memory for values",
                );
            }
        };
        let Some(planned) = &self.planned else { return Ok(()) };

        let (x, _activations_read) = activations.read(stream)?;
        let ([codes, scales], slots, _weights_read) = weights.read(stream)?;
        let other;
        let planned = match activations {
            Activations::Values(_) if !x[0].is_multiple_of(16) => {
                other = self.linear.planned(rows, false)?;
                &other
            }
            _ => planned,
        };
        let multiplied = match planned.before {
            Before::Split(_) => Dtype::F32,
            before if before.is_per_token() => Dtype::Bf16,
            _ => planned.product.config.activations,
        };
        let (steps, _steps_read) = epilogue.read(stream, multiplied)?;
        let ([semaphores, memory], _used) = workspace.write(stream, self.needed_bytes())?;
        let (out, _written) = match &mut values {
            Some(values) => {
                let (out, written) = values.write(stream, "the output", 1)?;
                (out, Some(written))
            }
            None => (memory + self.memory_bytes, None),
        };
        let quantized = quantized.map(|(QuantizedResults { out: to, scales, experts }, recipe)| {
            // SAFETY: the workspace has room for the results, and outlives the call. The product
            // writes them on the stream before they are read. All bits are values of f16 and bf16,
            // also in rows that no expert has.
            let values = unsafe { DeviceView::<O>::from_raw_parts(out, results.rows * results.cols) };
            let input = DeviceActivations { scales, experts, ..DeviceActivations::new(values, results) };
            check(&input, recipe, &to).map(|size| (input, recipe, size, to))
        });
        let quantized = quantized.transpose()?;
        // The parts of the workspace: the plan that is made on the GPU, the memory of the kernels
        // before the product, the product's own.
        let before = memory + planned.plan_bytes();
        let after = before + planned.before.bytes();

        let of_experts = routed.zip(planned.grid).map(|((routing, order), grid)| {
            let (tokens, tokens_read) = routing.tokens.device_ptr(stream);
            let (pairs, pairs_read) = routing.order.device_ptr(stream);
            let [from, to] = lists(order, [tokens, pairs]);
            let sorted = Sorted { pairs: rows as u32, top_k: routing.top_k as u32 };
            let routed = Routed { plan: memory, from, to };
            (routing, PlanGrid { sorted, ..grid }, routed, [tokens_read, pairs_read])
        });
        let routed = of_experts.as_ref().map_or_else(Routed::default, |(_, _, routed, _)| *routed);
        // Kernels ignore the bytes of absent global scales. The workspace is longer than slots are.
        let slot = slots.unwrap_or(memory);
        let apply = apply_direction(weights.direction());
        let matrices = count as u64;
        let operands = Operands { codes, matrices, scales, slot, activations: x[0], out, apply, steps };
        let product = &planned.product;
        // SAFETY: formats, layouts and lengths were checked above, and the plan is for this shape,
        // dtype and alignment. Experts' weights are linear, each starts on what kernels ask for,
        // and each has a slot, or the bytes of one. Experts' plan is made for the product's token
        // tiles, and the lists have the rows of all sorted pairs. The parts of the workspace follow
        // each other, with the planned bytes: activations have at most a row per token or pair. The
        // borrows keep the buffers from overlapping, until the launches are enqueued.
        unsafe {
            if let Some((routing, grid, routed, _)) = &of_experts {
                launch::plan_experts(kernels, stream, routing, *grid, routed.plan)?;
            }
            match (planned.before, activations) {
                (Before::Split([parts_bytes, _]), _) => {
                    let [parts, sums] = [before, before + parts_bytes];
                    launch::split(kernels, stream, x[0], parts, routed, [rows, shape.cols])?;
                    let of_parts = Operands { activations: parts, out: sums, steps: Steps::SUMS, ..operands };
                    let sorted = Routed { plan: routed.plan, ..Routed::default() };
                    launch::product(kernels, stream, product, &of_parts, sorted, [semaphores, after])?;
                    launch::merge(kernels, stream, [sums, out], steps, routed, None, [rows, shape.rows])
                }
                (Before::Fp4 { decode, bytes }, Activations::Fp4(activations)) => {
                    let params = activations.params(x_rows, count, alpha, apply.0);
                    let [factor_bytes, decoded_bytes, _] = bytes;
                    let decoded = before + factor_bytes;
                    let (sums, memory) = (decoded + decoded_bytes, [semaphores, before, decoded, after]);
                    let [codes, scales, slots, token_scales] = x;
                    let (plan, x) = ((product, decode), ([codes, scales, slots], params));
                    if planned.before.is_per_token() {
                        let of_sums = Operands { out: sums, steps: Steps::SUMS, ..operands };
                        let sorted = Routed { to: 0, ..routed };
                        launch::product_fp4(kernels, stream, plan, x, &of_sums, sorted, memory)?;
                        let globals = Some(TokenGlobals { token_scales, slots: slot, apply, alpha });
                        launch::merge(
                            kernels,
                            stream,
                            [sums, out],
                            steps,
                            routed,
                            globals,
                            [rows, shape.rows],
                        )
                    } else {
                        launch::product_fp4(kernels, stream, plan, x, &operands, routed, memory)
                    }
                }
                (Before::Fp8 { bytes: [codes_bytes, scales_bytes, _] }, Activations::Fp8(activations)) => {
                    let (per_group, [codes, scales]) = (token_scales > 1, [before, before + codes_bytes]);
                    let x = match activations {
                        Fp8Activations::Quantized { .. } => {
                            Fp8Source::Quantized(Fp8Operand { codes: x[0], scales: x[1], token_scales })
                        }
                        Fp8Activations::Values(_) if of_experts.is_some() => {
                            let (size, addresses) = ([x_rows, shape.cols], [x[0], codes, scales]);
                            if shape.cols > 0 {
                                let dtype = T::DTYPE;
                                launch::quantize_rows_fp8(
                                    kernels, stream, dtype, size, per_group, addresses,
                                )?;
                            }
                            Fp8Source::Quantized(Fp8Operand { codes, scales, token_scales })
                        }
                        Fp8Activations::Values(_) => {
                            Fp8Source::Values { address: x[0], dtype: T::DTYPE, per_group }
                        }
                    };
                    let x = (x, scales + scales_bytes);
                    launch::product_fp8(kernels, stream, product, x, &operands, routed, [semaphores, after])
                }
                (Before::Fp8 { .. }, Activations::Fp4(activations)) => {
                    let ([codes, scales, ..], params) =
                        (x, activations.params(x_rows, count, alpha, apply.0));
                    let x = Fp8Source::Mxfp4 { codes, scales, grid: params.scales, alpha: params.alpha };
                    // The bases of rows are the only memory before the product.
                    let (x, workspace) = ((x, before), [semaphores, after]);
                    launch::product_fp8(kernels, stream, product, x, &operands, routed, workspace)
                }
                _ => launch::product(kernels, stream, product, &operands, routed, [semaphores, after]),
            }?;
        }
        match quantized {
            Some((input, recipe, size, to)) => activations::enqueue(kernels, stream, input, recipe, size, to),
            None => Ok(()),
        }
    }
}
