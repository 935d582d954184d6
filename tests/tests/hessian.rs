//! Tests scales searched by the error in a layer's output.

mod hessian_tests {
    mod every_scale;
    mod inputs;
    mod laws;
}
