//! Tests of GPTQ.

mod gptq_tests {
    mod agreement;
    mod every_scale;
    mod laws;
    mod refusals;
}
