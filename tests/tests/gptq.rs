//! Tests of GPTQ.

mod gptq_tests {
    mod agreement;
    mod every_scale;
    mod inputs;
    mod laws;
    mod refusals;
}
