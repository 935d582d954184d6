//! Tests operations in another library's memory and on its streams.

use std::sync::Arc;

use half::bf16;
use microscale::gpu::cudarc::driver::result::stream::StreamKind;
use microscale::gpu::cudarc::driver::sys::{
    CUgraphInstantiate_flags, CUgraphNodeType, CUstreamCaptureMode, cuCtxCreate_v4, cuGraphGetNodes,
    cuGraphNodeGetType,
};
use microscale::gpu::cudarc::driver::{CudaContext, CudaStream, result};
use microscale::gpu::{
    DeviceAmax, DeviceQuantizeOptions, DeviceReport, DeviceTensor, DeviceTensorView, DeviceTensorViewMut,
    DeviceView, GemmWorkspaceMut, Gpu,
};
use microscale::{
    Amax, Batch, Dtype, Error, Format, GlobalScale, NonFinite, Numerics, OperandFault, Quantized,
    QuantizedShape, QuantizedTensor, Recipe, ScaleLayout, Search, Shape, amax, dequantize, gemv, quantize,
};
use microscale_test_support::cases::quantized_shape;
use microscale_test_support::operands::{Scales, tensor};
use microscale_test_support::weights::Activations;

use super::gemv_weights::{Product, assert_same};
use super::raw::{Raw, RawOperand, RawTensor};
use super::support::{assert_is_cpus, default_recipes, patterns};

fn nvfp4() -> Recipe {
    let recipe = Recipe::of(Format::Nvfp4, Numerics::Modelopt).unwrap();
    Recipe { non_finite: NonFinite::Propagate, ..recipe }
}

/// Returns the default recipes, and NVFP4 with a given global scale and without one.
fn recipes(scale_layout: ScaleLayout) -> Vec<Recipe> {
    use microscale::Global;
    let mut recipes = default_recipes(scale_layout);
    for global in [Global::Given(GlobalScale::Multiplier(0.0125)), Global::Absent] {
        recipes.push(Recipe { scale_layout, ..nvfp4().with_global(global) });
    }
    recipes
}

pub(crate) fn is_quantized_and_back(gpu: &Gpu) {
    let stream = gpu.stream();
    let shapes = [
        Shape::new(130, 144).with_row_stride(152),
        Shape::new(128, 256),
        Shape::new(3, 33),
        Shape::new(1, 1),
    ];
    for shape in shapes {
        for layout in [ScaleLayout::Linear, ScaleLayout::Swizzled] {
            for recipe in recipes(layout) {
                let what = format!("{shape:?} {recipe:?}");
                let values = patterns::<bf16>(shape.span().unwrap(), true, 21);
                let input = Raw::of(stream, bytemuck::cast_slice(&values));
                let mut out = RawTensor::used(stream, quantized_shape(shape, &recipe));
                let mut report = DeviceReport::zeros(stream).unwrap();
                let options = DeviceQuantizeOptions::new().report(&mut report);
                let mut view = out.view_mut();
                gpu.quantize_on(stream, input.view::<bf16>(), shape, &recipe, options, &mut view).unwrap();
                let tensor = view.as_view().to_host(stream).unwrap();
                let report = report.read(stream, shape, recipe.format()).unwrap();
                assert_is_cpus(&Quantized { tensor: tensor.clone(), report }, &values, shape, &recipe);

                let mut back = Raw::used(stream, shape.elements() * size_of::<f32>());
                gpu.dequantize_on(stream, view.as_view(), back.view_mut::<f32>(), shape.cols).unwrap();
                let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&back.read_as()), bits(&dequantize(&tensor)), "{what}");

                let other = match layout {
                    ScaleLayout::Linear => ScaleLayout::Swizzled,
                    ScaleLayout::Swizzled => ScaleLayout::Linear,
                };
                let mut converted = RawTensor::used(stream, view.shape().with_scale_layout(other));
                let mut there = converted.view_mut();
                gpu.convert_layout_on(stream, view.as_view(), &mut there).unwrap();
                let found = there.as_view().to_host(stream).unwrap();
                assert_eq!(found, tensor.convert_layout(other), "{what}");
                let mut scales = Raw::used(stream, found.scales().len());
                gpu.convert_scales_on(stream, view.as_view(), other, scales.view_mut()).unwrap();
                assert_eq!(scales.read(), found.scales(), "{what}");
                for raw in
                    [&out.codes, &out.scales, &out.slot, &converted.codes, &converted.scales, &converted.slot]
                {
                    raw.read();
                }
            }
        }
    }
}

pub(crate) fn takes_an_amax(gpu: &Gpu) {
    let (stream, shape) = (gpu.stream(), Shape::new(9, 161));
    let values = patterns::<f32>(shape.elements(), true, 22);
    let input = Raw::of(stream, bytemuck::cast_slice(&values));
    let mut words = Raw::zeros(stream, DeviceAmax::WORDS * size_of::<u32>());
    gpu.amax_on(stream, input.view::<f32>(), shape, words.view_mut()).unwrap();
    let [_, bits, nan, infinite] = words.read_as::<u32>()[..] else { panic!("four words") };
    let found = Amax { finite: f32::from_bits(bits), nan: nan != 0, infinite: infinite != 0 };
    assert_eq!(found, amax(&values, shape).unwrap());

    let mut fewer = Raw::zeros(stream, (DeviceAmax::WORDS - 1) * size_of::<u32>());
    let refused = gpu.amax_on(stream, input.view::<f32>(), shape, fewer.view_mut());
    assert!(matches!(refused, Err(Error::Length { expected: 4, found: 3, .. })), "{refused:?}");
}

/// Products must have the same bits as in cudarc's buffers.
///
/// Products of quantized vectors must have the CPU's bits.
pub(crate) fn is_multiplied(gpu: &Gpu) {
    const MOST: usize = 70;
    let stream = gpu.stream();
    for (seed, format) in [(3, Format::Nvfp4), (4, Format::Nvfp4), (5, Format::Nvfp4), (6, Format::Mxfp4)] {
        let weights = tensor(format, 300, 1024, Scales::Common, seed);
        let (there, raw) =
            (DeviceTensor::from_host(stream, &weights).unwrap(), RawOperand::of(stream, &weights));
        let bytes = gpu.gemm_workspace_bytes(weights.shape(), MOST, Dtype::Bf16).unwrap();
        let raw_workspace = Raw::zeros(stream, bytes);
        let mut workspace = gpu.gemm_workspace(stream, weights.shape(), MOST, Dtype::Bf16).unwrap();
        for tokens in [1, 8, 9, MOST, MOST] {
            let product = Product::<bf16>::new(weights.clone(), tokens, Activations::Common);
            let x = stream.clone_htod(&product.x).unwrap();
            let mut out = stream.alloc_zeros::<bf16>(product.results.len()).unwrap();
            let plan = gpu.linear::<bf16, bf16>(&there).plan(tokens).unwrap();
            plan.run(stream, &x, &mut workspace, &mut out).unwrap();
            let expected = stream.clone_dtoh(&out).unwrap();

            let x = Raw::of(stream, bytemuck::cast_slice(&product.x));
            let mut out = Raw::used(stream, 2 * product.results.len());
            // SAFETY: `raw_workspace` has `bytes` zeroed bytes and lives until the end of the loop.
            // Only products on this stream write to it.
            let in_memory =
                unsafe { GemmWorkspaceMut::from_raw_parts(raw_workspace.address(), bytes) }.unwrap();
            let plan = gpu.linear::<bf16, bf16>(raw.view()).plan(tokens).unwrap();
            plan.run(stream, x.view(), in_memory, out.view_mut()).unwrap();
            assert_same(&out.read_as::<bf16>(), &expected, &product.what());
            if tokens <= 8 {
                let mut out = Raw::used(stream, 2 * product.results.len());
                let plan = gpu.linear::<bf16, bf16>(raw.view()).without_workspace().plan(tokens).unwrap();
                plan.run(stream, x.view(), GemmWorkspaceMut::none(), out.view_mut()).unwrap();
                assert_same(&out.read_as::<bf16>(), &expected, &product.what());
            }
        }
        raw_workspace.read();

        let vectors = tensor(format, 1, 1024, Scales::Common, seed + 1);
        let mut expected = vec![0f32; 300];
        gemv(&weights, &vectors, Batch::default(), &mut expected).unwrap();
        let mut out = Raw::used(stream, 4 * expected.len());
        let of_vectors = RawOperand::of(stream, &vectors);
        gpu.gemv_on(stream, raw.view(), of_vectors.view(), Batch::default(), out.view_mut::<f32>()).unwrap();
        assert_same(&out.read_as::<f32>(), &expected, "gemv");
    }
}

pub(crate) fn with_the_wrong_alignment_is_refused(gpu: &Gpu) {
    let stream = gpu.stream();
    let shape = QuantizedShape::new(Format::Mxfp4, 4, 64);
    let memory = Raw::zeros(stream, 4096);
    let mut out = Raw::used(stream, 4096);
    let at = |codes: u64, scales: u64| {
        // SAFETY: `memory` lives until the end of the test and extends beyond both addresses plus
        // the sizes of this shape.
        unsafe {
            DeviceTensorView::from_raw_parts(shape, memory.address() + codes, memory.address() + scales)
        }
        .unwrap()
    };
    let refused = |view: DeviceTensorView<'_>, out: &mut Raw| {
        let out = out.view_mut::<f32>();
        gpu.dequantize_on(stream, view, out, shape.cols).unwrap_err()
    };
    let wrong = refused(at(8, 1024), &mut out);
    assert!(matches!(wrong, Error::Alignment { what: "the codes", needed: 16, .. }), "{wrong:?}");
    let wrong = refused(at(0, 1028), &mut out);
    assert!(matches!(wrong, Error::Alignment { what: "the scales", needed: 16, .. }), "{wrong:?}");
    // SAFETY: `memory` lives until the end of the test and extends beyond 2 + 1024 bytes.
    let odd = unsafe { DeviceView::<f32>::from_raw_parts(memory.address() + 2, 256) };
    let mut words = Raw::zeros(stream, 16);
    let wrong = gpu.amax_on(stream, odd, Shape::new(4, 64), words.view_mut()).unwrap_err();
    assert!(matches!(wrong, Error::Alignment { what: "the input", needed: 4, .. }), "{wrong:?}");
    assert!(out.read().iter().all(|byte| *byte == 0x5B));

    // Missing memory.
    let recipe = nvfp4();
    let values = Raw::zeros(stream, 4 * 64 * 4);
    let mut tensor = RawTensor::used(stream, quantized_shape(Shape::new(4, 64), &recipe));
    let (codes, scales) = (tensor.codes.address(), tensor.scales.address());
    // SAFETY: `tensor.codes` and `tensor.scales` have the sizes of this shape and outlive the view.
    let without = unsafe { DeviceTensorViewMut::from_raw_parts(tensor.shape, codes, scales) }.unwrap();
    let options = DeviceQuantizeOptions::new();
    let wrong = gpu.quantize_on(stream, values.view::<f32>(), Shape::new(4, 64), &recipe, options, without);
    assert!(matches!(wrong, Err(Error::NoGlobalSlot { .. })), "{wrong:?}");
    let mut short = Raw::zeros(stream, 16);
    let wrong = tensor.view_mut().with_global_slot(short.view_mut()).map(drop);
    assert!(matches!(wrong, Err(Error::Length { found: 4, .. })), "{wrong:?}");
    // SAFETY: the call refuses the size, so no kernel accesses the memory.
    let wrong = unsafe { GemmWorkspaceMut::from_raw_parts(memory.address(), 4096) }.map(drop);
    assert!(matches!(wrong, Err(Error::Operands(OperandFault::Workspace { .. }))), "{wrong:?}");
}

/// Buffers of another context on the same GPU are treated like buffers of another GPU.
pub(crate) fn of_another_context_is_refused(gpu: &Gpu) {
    let (stream, shape) = (gpu.stream(), Shape::new(4, 64));
    let device = result::device::get(0).unwrap();
    let mut context = std::ptr::null_mut();
    // SAFETY: the device exists. The new context is written to `context`, and `CudaContext` takes
    // ownership immediately.
    let other = unsafe {
        cuCtxCreate_v4(&raw mut context, std::ptr::null_mut(), 0, device).result().unwrap();
        CudaContext::from_raw_context(0, device, context).unwrap()
    };
    {
        let theirs = other.default_stream();
        let values = theirs.alloc_zeros::<f32>(shape.elements()).unwrap();
        let mut words = Raw::zeros(stream, 4 * DeviceAmax::WORDS);
        let wrong = gpu.amax_on(stream, &values, shape, words.view_mut());
        assert!(matches!(wrong, Err(Error::OtherContext { what: "the input" })), "{wrong:?}");
        let mut words = theirs.alloc_zeros::<u32>(DeviceAmax::WORDS).unwrap();
        let values = Raw::zeros(stream, 4 * shape.elements());
        let wrong = gpu.amax_on(stream, values.view::<f32>(), shape, &mut words).unwrap_err();
        assert!(matches!(wrong, Error::OtherContext { .. }), "{wrong:?}");
        assert!(wrong.to_string().contains("copy it, or use a stream of its context"), "{wrong}");
        let tensor = tensor(Format::Mxfp4, 4, 64, Scales::Common, 1);
        let tensor = DeviceTensor::from_host(&theirs, &tensor).unwrap();
        let mut back = Raw::used(stream, 4 * shape.elements());
        let wrong = gpu.dequantize_on(stream, &tensor, back.view_mut::<f32>(), shape.cols);
        assert!(matches!(wrong, Err(Error::OtherContext { what: "the codes" })), "{wrong:?}");
        theirs.synchronize().unwrap();
    }
    drop(other);
    gpu.context().bind_to_thread().unwrap();
}

/// Converts buffers to a tensor and back.
pub(crate) fn becomes_a_tensor_and_back(gpu: &Gpu) {
    let stream = gpu.stream();
    for seed in 0..3 {
        let host = tensor(Format::Nvfp4, 30, 80, Scales::Common, seed);
        let [codes, scales] = [host.codes(), host.scales()].map(|bytes| stream.clone_htod(bytes).unwrap());
        let short = DeviceTensor::from_parts(
            stream,
            QuantizedShape { rows: 31, ..host.shape() },
            codes.clone(),
            scales.clone(),
        );
        assert!(matches!(short, Err(Error::QuantizedLength { .. })), "{short:?}");
        let mut made = DeviceTensor::from_parts(stream, host.shape(), codes, scales).unwrap();
        if let Some(global) = host.global_scale() {
            made = made.with_global_scale(stream, global).unwrap();
        }
        assert_eq!(made.to_host(stream).unwrap(), host);
        let (codes, scales, _) = made.into_parts();
        let back = [codes, scales].map(|bytes| stream.clone_dtoh(&bytes).unwrap());
        assert_eq!(back, [host.codes(), host.scales()]);
    }
    let empty = DeviceTensor::zeros(stream, QuantizedShape::new(Format::Nvfp4, 0, 64)).unwrap();
    let shape = empty.shape();
    let (codes, scales, _) = empty.into_parts();
    let again = DeviceTensor::from_parts(stream, shape, codes, scales).unwrap();
    assert_eq!(again.to_host(stream).unwrap(), QuantizedTensor::zeros(shape).unwrap());
}

/// A stream of another library does the work and still exists afterwards.
pub(crate) fn works_on_another_librarys_stream(gpu: &Gpu) {
    let shape = Shape::new(40, 96);
    let values = patterns::<f32>(shape.elements(), false, 23);
    gpu.context().bind_to_thread().unwrap();
    let theirs = result::stream::create(StreamKind::NonBlocking).unwrap();
    {
        // SAFETY: the stream belongs to this context and is destroyed only after this block.
        let stream = unsafe { gpu.context().wrap_borrowed_stream(theirs) };
        let on_theirs = Gpu::from_stream(stream.clone()).unwrap();
        assert!(Arc::ptr_eq(on_theirs.stream(), &stream));
        for recipe in default_recipes(ScaleLayout::Linear) {
            let found = on_theirs.quantize(&values, shape, &recipe).unwrap();
            assert_is_cpus(&found, &values, shape, &recipe);
        }
        let in_context = Gpu::from_context(gpu.context().clone()).unwrap();
        assert_eq!(in_context.info(), gpu.info());
        let found = in_context.quantize(&values, shape, &Recipe::default()).unwrap();
        assert_is_cpus(&found, &values, shape, &Recipe::default());
    }
    gpu.context().bind_to_thread().unwrap();
    // SAFETY: this test created the stream and is the only one to destroy it.
    unsafe {
        result::stream::synchronize(theirs).unwrap();
        result::stream::destroy(theirs).unwrap();
    }
}

/// Captures enqueued work and counts kernels, memsets and copies.
///
/// A capture refuses to wait, and allocations are nodes of another kind.
fn captured(stream: &Arc<CudaStream>, mut enqueue: impl FnMut()) -> [usize; 3] {
    // The driver compiles a kernel on its first use.
    enqueue();
    stream.synchronize().unwrap();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
    enqueue();
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap();
    let mut count = 0;
    // SAFETY: with a null array, the driver writes only the number of nodes to `count`.
    unsafe { cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &raw mut count) }.result().unwrap();
    let mut nodes = vec![std::ptr::null_mut(); count];
    // SAFETY: `nodes` has room for `count` nodes.
    unsafe { cuGraphGetNodes(graph.cu_graph(), nodes.as_mut_ptr(), &raw mut count) }.result().unwrap();
    let mut counts = [0; 3];
    for node in nodes {
        let mut kind = CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
        // SAFETY: `node` belongs to `graph`, which is alive.
        unsafe { cuGraphNodeGetType(node, &raw mut kind) }.result().unwrap();
        match kind {
            CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL => counts[0] += 1,
            CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET => counts[1] += 1,
            CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY => counts[2] += 1,
            other => panic!("a node of kind {other:?}"),
        }
    }
    counts
}

/// Every operation on device memory enqueues only kernels, memsets and copies on the device.
///
/// Allocations, waits and events are not allowed.
pub(crate) fn operations_allocate_nothing_and_do_not_wait(_: &Gpu) {
    // A handle of its own: captures do not allow cudarc's events.
    let gpu = &Gpu::new(0).unwrap();
    // SAFETY: until tracking is enabled again, all work of this context uses one stream.
    unsafe { gpu.context().disable_event_tracking() };
    let (stream, shape) = (gpu.stream(), Shape::new(65, 256));
    let values = Raw::of(stream, bytemuck::cast_slice(&patterns::<bf16>(shape.elements(), false, 24)));
    let mut words = Raw::zeros(stream, 16);
    let amax = captured(stream, || {
        gpu.amax_on(stream, values.view::<bf16>(), shape, words.view_mut()).unwrap();
    });
    assert_eq!(amax, [1, 0, 0]);

    let mut report = DeviceReport::zeros(stream).unwrap();
    let importance = Raw::of(stream, bytemuck::cast_slice(&vec![1f32; shape.cols]));
    let mut back = Raw::used(stream, 2 * shape.elements());
    for scale_layout in [ScaleLayout::Linear, ScaleLayout::Swizzled] {
        for recipe in recipes(scale_layout) {
            let what = format!("{recipe:?}");
            let mut out = RawTensor::used(stream, quantized_shape(shape, &recipe));
            let mut view = out.view_mut();
            // A memset clears padding, and another one an amax before it is computed.
            let padded = usize::from(scale_layout == ScaleLayout::Swizzled);
            let planned = usize::from(recipe.scheme.global_from_amax().is_some());
            let quantizing = captured(stream, || {
                let options = DeviceQuantizeOptions::new().report(&mut report);
                gpu.quantize_on(stream, values.view::<bf16>(), shape, &recipe, options, &mut view).unwrap();
            });
            assert_eq!(quantizing, [1 + 2 * planned, padded + planned, 0], "{what}");
            if matches!(recipe.format(), Format::Mxfp4 | Format::Nvfp4) {
                let search = Recipe { search: Search::Full, ..recipe };
                let searching = captured(stream, || {
                    let options = DeviceQuantizeOptions::new().importance(importance.view());
                    gpu.quantize_on(stream, values.view::<bf16>(), shape, &search, options, &mut view)
                        .unwrap();
                });
                assert_eq!(searching, [1 + 2 * planned, padded + planned, 0], "{what}");
            }
            if planned == 1 {
                let given = captured(stream, || {
                    let options = DeviceQuantizeOptions::new().amax(words.view());
                    gpu.quantize_on(stream, values.view::<bf16>(), shape, &recipe, options, &mut view)
                        .unwrap();
                });
                assert_eq!(given, [2, padded, 1], "{what}");
                let finished = captured(stream, || {
                    let direction = recipe.scheme.global_from_amax().expect("it has one").direction;
                    let options = DeviceQuantizeOptions::new().global_scale(direction, words.view());
                    gpu.quantize_on(stream, values.view::<bf16>(), shape, &recipe, options, &mut view)
                        .unwrap();
                });
                assert_eq!(finished, [2, padded, 1], "{what}");
            }
            let dequantizing = captured(stream, || {
                gpu.dequantize_on(stream, view.as_view(), back.view_mut::<bf16>(), shape.cols).unwrap();
            });
            assert_eq!(dequantizing, [1, 0, 0], "{what}");
            let global = usize::from(view.direction().is_some());
            for to in [ScaleLayout::Linear, ScaleLayout::Swizzled] {
                let mut converted = RawTensor::used(stream, view.shape().with_scale_layout(to));
                let mut there = converted.view_mut();
                let converting = captured(stream, || {
                    gpu.convert_layout_on(stream, view.as_view(), &mut there).unwrap();
                });
                let same = usize::from(to == scale_layout);
                assert_eq!(converting, [1 - same, 0, 1 + same + global], "{what} to {to:?}");
            }
        }
    }
    for format in Format::MULTIPLIED {
        let weights = tensor(format, 600, 2048, Scales::Common, 0);
        let vectors = RawOperand::of(stream, &tensor(format, 1, 2048, Scales::Common, 1));
        let (raw, x) = (RawOperand::of(stream, &weights), Raw::zeros(stream, 200 * 2048 * 2));
        let mut out = Raw::used(stream, 200 * 600 * 2);
        let bytes = gpu.gemm_workspace_bytes(weights.shape(), 200, Dtype::Bf16).unwrap();
        let workspace = Raw::zeros(stream, bytes);
        let product = captured(stream, || {
            let (matrix, vectors) = (raw.view(), vectors.view());
            gpu.gemv_on(stream, matrix, vectors, Batch::default(), out.view_mut::<bf16>()).unwrap();
        });
        assert_eq!(product, [1, 0, 0], "gemv, {format}");
        for tokens in [1, 8, 16, 200] {
            let mut kernels = 0;
            let product = captured(stream, || {
                // SAFETY: `workspace` has `bytes` zeroed bytes and lives until the end of the loop.
                // Only products on this stream write to it.
                let workspace =
                    unsafe { GemmWorkspaceMut::from_raw_parts(workspace.address(), bytes) }.unwrap();
                let plan = gpu.linear::<bf16, bf16>(raw.view()).plan(tokens).unwrap();
                kernels = plan.kernels().count();
                plan.run(stream, x.view(), workspace, out.view_mut()).unwrap();
            });
            assert_eq!(product, [kernels, 0, 0], "{tokens} tokens, {format}");
            assert!(kernels == 1 || tokens > 8, "{tokens} tokens, {format}: {kernels} kernels");
        }
        let product = captured(stream, || {
            let plan = gpu.linear::<bf16, bf16>(raw.view()).without_workspace().plan(8).unwrap();
            plan.run(stream, x.view(), GemmWorkspaceMut::none(), out.view_mut()).unwrap();
        });
        assert_eq!(product, [1, 0, 0], "without a workspace, {format}");
    }
    let host = quantize(&[1f32; 64], Shape::new(1, 64), &nvfp4()).unwrap().tensor;
    let mut tensor = Some(DeviceTensor::from_host(stream, &host).unwrap());
    let setting = captured(stream, || {
        let set = tensor.take().unwrap().with_global_scale(stream, GlobalScale::Divisor(3.0));
        tensor = Some(set.unwrap());
    });
    assert_eq!(setting, [0, 1, 0], "a global scale");
    // SAFETY: all work has completed, so no buffer of a later test lacks an event.
    unsafe { gpu.context().enable_event_tracking() };
}
