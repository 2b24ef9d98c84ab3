// Shows the OpenAPI document with Swagger UI.

/** The document as Swagger UI 4 reads it. It knows OpenAPI 3.0, which has `nullable` and `enum` where 3.1 has other words. */
function asOpenApi30(value) {
  if (Array.isArray(value)) return value.map(asOpenApi30);
  if (value === null || typeof value !== "object") return value;
  const result = {};
  for (const [key, each] of Object.entries(value)) result[key] = asOpenApi30(each);
  if (Array.isArray(result.anyOf)) {
    const types = result.anyOf.filter((each) => each.type !== "null");
    if (types.length < result.anyOf.length) {
      result.nullable = true;
      delete result.anyOf;
      Object.assign(result, types.length === 1 ? { ...types[0], ...result } : { anyOf: types });
    }
  }
  if ("const" in result) {
    result.enum = [result.const];
    delete result.const;
  }
  if (Array.isArray(result.examples) && !("example" in result)) {
    result.example = result.examples[0];
    delete result.examples;
  }
  return result;
}

const response = await fetch("openapi.json");
const servers = [{ url: new URL(".", location.href).href }]; // a proxy may have put the service below a prefix
const spec = { ...asOpenApi30(await response.json()), openapi: "3.0.3", servers };
window.ui = SwaggerUIBundle({ spec, dom_id: "#swagger-ui", deepLinking: true, validatorUrl: null });
